#!/usr/bin/env python3
"""Fails when an #include or a Python import runs against the direction of the layers.

    core -> {theory, cpu, cuda} -> api -> check -> {apps, bench, bindings}

and within cuda

    ptx -> tile -> blocks -> {decode, general, sm90/common -> {sm90/forward, sm90/forward_tf32, sm90/backward},
                              pipeline/sm90}
    device -> blocks;  ptx -> pipeline/common -> {pipeline/sm80, pipeline/sm90} -> pipeline;  all of them -> rows

A file may include its own layer and what LAYERS grants it: only layers that stand above it there, so that no circle is
possible. Headers of torch and CUDA appear only where FOREIGN grants them; the public headers know neither. Python files
import nothing from the folders that NOT_IMPORTED names: the installed package knows no folder of the repository, and
tests lie outside what they test.

    tools/check_includes.py [ROOT]
"""

import re
import sys
from pathlib import Path

# Layer: (folder, layers it may include besides itself, all of which stand above it). Where folders of a layer are
# layers of their own, its own files lie in none of them; "cuda/*" grants every layer of that folder.
LAYERS = {
    "public": ("include/dspattn", []),
    "core": ("src/core", ["public"]),
    "theory": ("src/theory", ["public", "core"]),
    "cpu": ("src/cpu", ["public", "core"]),
    "cuda/ptx": ("src/cuda/ptx", ["public", "core"]),
    "cuda/tile": ("src/cuda/tile", ["public", "core", "cuda/ptx"]),
    "cuda/device": ("src/cuda/device", ["public", "core"]),
    "cuda/blocks": ("src/cuda/blocks", ["public", "core", "cuda/ptx", "cuda/tile", "cuda/device"]),
    "cuda/decode": ("src/cuda/decode", ["public", "core", "cuda/ptx", "cuda/tile", "cuda/device", "cuda/blocks"]),
    "cuda/pipeline/common": ("src/cuda/pipeline/common", ["public", "core", "cuda/ptx"]),
    "cuda/pipeline/sm80": (
        "src/cuda/pipeline/sm80",
        ["public", "core", "cuda/ptx", "cuda/device", "cuda/pipeline/common"],
    ),
    "cuda/pipeline/sm90": (
        "src/cuda/pipeline/sm90",
        ["public", "core", "cuda/ptx", "cuda/tile", "cuda/device", "cuda/blocks", "cuda/pipeline/common"],
    ),
    "cuda/pipeline": ("src/cuda/pipeline", ["public", "core", "cuda/device", "cuda/pipeline/*"]),
    "cuda/sm90/common": ("src/cuda/sm90/common", ["public", "core", "cuda/tile", "cuda/device", "cuda/blocks"]),
    "cuda/sm90/forward": (
        "src/cuda/sm90/forward",
        ["public", "core", "cuda/ptx", "cuda/tile", "cuda/device", "cuda/blocks", "cuda/sm90/common"],
    ),
    "cuda/sm90/forward_tf32": (
        "src/cuda/sm90/forward_tf32",
        ["public", "core", "cuda/ptx", "cuda/tile", "cuda/device", "cuda/blocks", "cuda/sm90/common"],
    ),
    "cuda/sm90/backward": (
        "src/cuda/sm90/backward",
        ["public", "core", "cuda/ptx", "cuda/tile", "cuda/device", "cuda/blocks", "cuda/sm90/common"],
    ),
    "cuda/general": (
        "src/cuda/general",
        ["public", "core", "cuda/ptx", "cuda/tile", "cuda/device", "cuda/blocks"],
    ),
    "cuda/norm_rope": ("src/cuda/norm_rope", ["public", "core", "cuda/ptx", "cuda/device"]),
    "cuda": (
        "src/cuda",
        [
            "public",
            "core",
            "cuda/tile",
            "cuda/device",
            "cuda/blocks",
            "cuda/decode",
            "cuda/pipeline",
            "cuda/sm90/forward",
            "cuda/sm90/forward_tf32",
            "cuda/sm90/backward",
            "cuda/general",
        ],
    ),
    "api": ("src/api", ["public", "core", "theory", "cpu", "cuda", "cuda/device", "cuda/norm_rope", "cuda/pipeline"]),
    "check": ("src/check", ["public", "core", "cpu", "cuda", "cuda/device", "api"]),
    "apps": ("apps", ["public", "core", "api", "check"]),
    "bench": ("bench", ["public", "core", "cuda", "cuda/*"]),
    "bindings": ("bindings", ["public"]),
    "tests": ("tests", ["public", "core", "theory", "cpu", "cuda", "cuda/*", "api", "check", "apps"]),
}

# Headers from elsewhere that only some layers may see.
FOREIGN = {
    "torch": (re.compile(r"^(torch|ATen|c10)/"), {"bindings"}),
    "CUDA": (re.compile(r"^(cuda|cublas|cudnn|cute/|cutlass/|driver_types|nvrtc)"), {"cuda", "check", "apps", "tests"}),
    "Highway": (re.compile(r"^hwy/"), {"cpu", "apps", "tests"}),
}

# Folder of Python files: folders that nothing in it imports from.
NOT_IMPORTED = {
    "python": ["bench", "experiments", "tests", "tools"],
    "experiments": ["tests", "tools"],
    "bench": ["experiments", "tests"],
    "tests": ["bench"],
}

IMPORT = re.compile(r"^\s*(?:from|import)\s+([A-Za-z_]\w*)")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
SOURCES = {".h", ".cpp", ".cu", ".cuh", ".inc"}


def layer_of(path):
    """The layer a path relative to the root belongs to, that of the innermost folder; or None."""
    text = path.as_posix()
    found = [layer for layer, (folder, _) in LAYERS.items() if text.startswith(folder + "/")]
    return max(found, key=lambda layer: len(LAYERS[layer][0]), default=None)


def grants(layer, other):
    """Whether files of a layer may include those of another."""
    return any(
        granted == other or (granted.endswith("/*") and other.startswith(granted[:-1])) for granted in LAYERS[layer][1]
    )


def is_astray(path, layer):
    """Whether a file lies in a folder that is no layer, below a layer whose folders are."""
    folder = LAYERS[layer][0]
    divided = any(other.startswith(folder + "/") for other, _ in LAYERS.values())
    return divided and path.parent.as_posix() != folder


def resolve(root, source, target):
    """The file an include names, relative to the root, or None when it is not one of ours."""
    for base in (source.parent, Path("src"), Path("include"), Path("tests"), Path(".")):
        candidate = (root / base / target).resolve()
        if candidate.is_file() and candidate.is_relative_to(root):
            return candidate.relative_to(root)
    return None


def violations(root):
    """(number of files read, one line per include or import that is not allowed)."""
    found = []
    count = 0
    for layer, (folder, _) in LAYERS.items():
        for file in sorted((root / folder).rglob("*")):
            source = file.relative_to(root)
            if file.suffix not in SOURCES or not file.is_file() or layer_of(source) != layer:
                continue
            count += 1
            if is_astray(source, layer):
                found.append(f"{source}: in no layer; add its folder to LAYERS of tools/check_includes.py")
            for number, line in enumerate(file.read_text().splitlines(), start=1):
                match = INCLUDE.match(line)
                if match:
                    reason = refusal(root, source, layer, match.group(2))
                    if reason:
                        found.append(f"{source}:{number}: {reason}")
    for folder, forbidden in NOT_IMPORTED.items():
        for file in sorted((root / folder).rglob("*.py")):
            count += 1
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
                match = IMPORT.match(line)
                if match and match[1] in forbidden:
                    found.append(f"{file.relative_to(root)}:{number}: {folder} imports nothing from {match[1]}")
    return count, found


def refusal(root, source, layer, target):
    """Why a file of this layer may not include the target, or None."""
    ours = resolve(root, source, target)
    if ours is not None:
        other = layer_of(ours)
        if other is not None and other != layer and not grants(layer, other):
            allowed = ", ".join([layer] + LAYERS[layer][1])
            return f'"{target}" is of layer {other}; {layer} may include {allowed}'
        return None
    for name, (pattern, layers) in FOREIGN.items():
        if pattern.match(target) and layer.split("/")[0] not in layers:
            return f"<{target}> is of {name}; only {', '.join(sorted(layers))} may include it"
    return None


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    count, found = violations(root)
    for line in found:
        print(line, file=sys.stderr)
    if count == 0:
        print(f"includes: no sources under {root}", file=sys.stderr)
        return 1
    if found:
        print(f"includes: {len(found)} against the direction of the layers", file=sys.stderr)
        return 1
    print(f"includes: {count} files, all in the direction of the layers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
