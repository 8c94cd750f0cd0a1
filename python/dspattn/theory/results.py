"""Result files: one JSON shape for every measurement, written by what measured it and by nothing else."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


def _revision() -> str:
    """The git revision of this source tree, with -dirty when it has uncommitted changes; "unknown" outside git."""
    here = Path(__file__).resolve().parent
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _command() -> str:
    """The command line, with the folder of the data named DATA: where it lay on one machine says nothing."""
    arguments = list(sys.argv[1:])
    if "--data" in arguments[:-1]:
        arguments[arguments.index("--data") + 1] = "DATA"
    return " ".join(["python -m dspattn.theory", *map(shlex.quote, arguments)])


def write(path: Path, rows: list[dict[str, Any]], versions: dict[str, str], **more: Any) -> None:
    """Writes a result file; ``more`` are further top-level entries such as the powers that ``rows`` refer to."""
    content: dict[str, Any] = {
        "command": _command(),
        "commit": _revision(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": {"name": _processor(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), **versions},
        **more,
    }
    # One row a line: small files, and differences that can be read.
    lines = ",\n    ".join(json.dumps(row) for row in rows)
    head = json.dumps(content, indent=1)[:-2]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "rows": [\n    {lines}\n ]\n}}\n')


def read(path: Path) -> dict[str, Any]:
    """A result file; a missing or broken one raises an error that says how to make it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such result file; `python -m dspattn.theory all` writes it")
    try:
        content: Any = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise ValueError(f"{path}: expected an object with a list `rows`")
    return content
