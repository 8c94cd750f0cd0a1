"""Builds several versions of the fused Hopper kernel and times them beside each other and beside cuDNN.

    python3 -m bench.variants build base=../base new=. wider=.,-DX=1 --dims 64 --no-general
    python3 -m bench.variants time base new wider --cells 256:64:causal:2:4 4096:64 --idle 0.1 --check --out new.json

build needs nvcc and no GPU. A version is NAME=TREE[,flag...]: a source tree (a git worktree, or . for this one) and
flags for nvcc. It becomes DIR/NAME.so, which may be carried to the machine with the GPU: the CUDA runtime is inside.
A kernel that spills registers or whose wgmma are serialised does not build, unless --unchecked.

time needs a Hopper GPU and torch. A cell is N:D[:MASK[:PATTERN]], each a list with commas and all combinations meant;
MASK is full or causal, PATTERN 2:4 or 1:2, both where left out. 16384 tokens, hidden size 2048, and bursts as in
bench/common/timing.py. The versions and cuDNN take turns, --rounds times, each time beginning with the next one, so
that clocks and heat are the same for all; the median is over all rounds. Ratios above 1 are faster: than cuDNN, than
the first version. --check compares outputs and log-sum-exps with the first version's, bit by bit. Every version's first
launches are made in a process of their own: one that hangs or crashes is left out.
"""

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

from bench.common import results
from bench.variants import build as building

MASKS = ("full", "causal")
DEFAULT_CELLS = ("1024,4096:64,128",)
DEFAULT_DIR = results.ROOT / "out" / "variants"


class Place(NamedTuple):
    """One cell to time."""

    n: int
    d: int
    mask: str
    pattern: str

    def __str__(self):
        return ":".join(map(str, self))


def parse_cells(text):
    """N:D[:MASK[:PATTERN]], each a list with commas: all combinations."""
    fields = text.split(":", 3)
    numbers, words = fields[:2], fields[2:]
    masks = words[0].split(",") if words else list(MASKS)
    patterns = words[1].split(",") if len(words) > 1 else list(building.PATTERNS)
    try:
        lengths, dims = ([int(entry) for entry in field.split(",")] for field in numbers)
    except ValueError:
        raise ValueError(f'cell: expected N:D[:MASK[:PATTERN]] with numbers N and D, got "{text}"') from None
    for given, known, what in ((masks, MASKS, "MASK"), (patterns, building.PATTERNS, "PATTERN")):
        if unknown := [entry for entry in given if entry not in known]:
            raise ValueError(f'cell: expected {what} of {", ".join(known)}, got "{",".join(unknown)}" in "{text}"')
    if min(*lengths, *dims) < 1 or max(dims) > max(building.DIMS):
        raise ValueError(f'cell: expected N from 1, D from 1 to {max(building.DIMS)}, got "{text}"')
    return [Place(*values) for values in itertools.product(lengths, dims, masks, patterns)]


def parse_library(text, folder):
    """NAME, which is FOLDER/NAME.so, or NAME=PATH."""
    name, equals, path = text.partition("=")
    found = Path(path) if equals else Path(folder) / f"{name}.so"
    if not name or name == "cudnn" or not found.is_file():
        raise ValueError(f'version: expected a name (not cudnn) whose library exists, got "{text}" ({found})')
    return name, str(found.resolve())


def different(names):
    names = list(names)
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"version: expected different names, got {', '.join(repeated)} more than once")


def listed(known, kind=str):
    """An argument that is a list with commas, of known words."""

    def parse(text):
        try:
            values = [kind(entry) for entry in text.split(",")]
        except ValueError:
            values = []
        if not values or any(value not in known for value in values):
            raise argparse.ArgumentTypeError(f'expected some of {",".join(map(str, known))}, got "{text}"')
        return list(dict.fromkeys(values))

    return parse


def arguments_of(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)

    build = steps.add_parser("build", help="compile versions")
    build.add_argument("versions", nargs="+", metavar="NAME=TREE[,flag...]")
    build.add_argument("--types", type=listed(building.TYPES), default=["bf16"])
    build.add_argument("--patterns", type=listed(building.PATTERNS), default=list(building.PATTERNS))
    build.add_argument("--dims", type=listed(building.DIMS, int), default=[64, 128])
    build.add_argument(
        "--no-general", action="store_true", help="leave out the variant for masks and unaligned tensors"
    )
    build.add_argument("--unchecked", action="store_true", help="build what spills registers or serialises wgmma, too")
    build.add_argument("--jobs", type=int, default=os.cpu_count())
    build.add_argument("--dir", default=DEFAULT_DIR, help="where the libraries go (out/variants)")

    time = steps.add_parser("time", help="time what was built")
    time.add_argument("versions", nargs="+", metavar="NAME[=PATH]", help="the first is what the others are compared to")
    time.add_argument("--cells", nargs="+", default=list(DEFAULT_CELLS), metavar="N:D[:MASK[:PATTERN]]")
    time.add_argument("--dir", default=DEFAULT_DIR, help="where the libraries are (out/variants)")
    time.add_argument("--type", choices=tuple(building.TYPES), default="bf16")
    time.add_argument("--grouping", choices=("interleaved", "consecutive"), default="interleaved")
    time.add_argument("--rounds", type=int, default=5)
    time.add_argument("--idle", type=float, default=0.5, help="seconds of pause before a burst")
    time.add_argument("--check", action="store_true", help="compare results with the first version's")
    time.add_argument("--timeout", type=float, default=20.0, help="seconds that the first launches of a cell may take")
    time.add_argument("--out", help="JSON file to write, anew after every cell")

    # What `time` starts to try first launches.
    probe = steps.add_parser("probe")
    probe.add_argument("request", help="JSON")

    arguments = parser.parse_args(argv)
    try:
        if arguments.step == "build":
            arguments.versions = [building.parse_version(text) for text in arguments.versions]
            different(version.name for version in arguments.versions)
        elif arguments.step == "time":
            libraries = [parse_library(text, arguments.dir) for text in arguments.versions]
            different(name for name, _ in libraries)
            arguments.versions = dict(libraries)
            arguments.places = list(dict.fromkeys(itertools.chain(*map(parse_cells, arguments.cells))))
            if arguments.rounds < 1:
                raise ValueError(f"rounds: expected at least 1, got {arguments.rounds}")
    except ValueError as error:
        parser.error(str(error))
    return arguments


def run_build(arguments):
    instances = [
        building.Instance(*values) for values in itertools.product(arguments.types, arguments.patterns, arguments.dims)
    ]
    errors = building.build(
        arguments.versions,
        instances,
        Path(arguments.dir),
        general=not arguments.no_general,
        checked=not arguments.unchecked,
        jobs=arguments.jobs,
    )
    return 1 if errors else 0


def main(argv):
    arguments = arguments_of(argv)
    if arguments.step == "build":
        try:
            return run_build(arguments)
        except building.BuildError as error:
            print(f"variants: {error}", file=sys.stderr)
            return 1
    from bench.variants import timed  # torch is needed from here on only

    if arguments.step == "probe":
        request = json.loads(arguments.request)
        return timed.probe(**{**request, "places": [Place(*place) for place in request["places"]]})
    return timed.run(arguments, arguments.versions, arguments.places)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
