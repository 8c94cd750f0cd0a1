"""Prints the folder of the torch package the operators are to be built against, without importing it.

A build that pip isolates cannot import the torch of the environment it installs into, but can see its files.
"""

import importlib.util
import pathlib
import re
import sys
import sysconfig

OLDEST = (2, 10)


def candidates() -> list[pathlib.Path]:
    spec = importlib.util.find_spec("torch")
    found = [pathlib.Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return found + [pathlib.Path(sysconfig.get_path(key)) / "torch" for key in ("purelib", "platlib")]


def main() -> int:
    for folder in candidates():
        header = folder / "include" / "torch" / "headeronly" / "version.h"
        if not (folder / "version.py").is_file():
            continue
        version = re.search(r"__version__ = '([^']+)'", (folder / "version.py").read_text())
        text = version.group(1) if version else "unknown"
        numbers = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
        if numbers < OLDEST or not header.is_file():
            print(f"torch: expected version >= 2.10 with its headers, got {text} in {folder}", file=sys.stderr)
            return 1
        print(folder)
        return 0
    print(
        "torch: expected torch >= 2.10 in this environment, got none. Install it first "
        "(pip install torch), then build again.",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
