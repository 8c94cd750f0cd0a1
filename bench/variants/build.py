"""Builds versions of the fused Hopper kernel side by side, for bench.variants: no CMake, no GPU, only nvcc.

A version is a source tree with extra compiler flags. Its library has the C interface of bench/common/shim.h over
the chosen instances alone (variant.cpp), with the CUDA runtime inside, so that it can be carried to the machine
with the GPU. The two shims are this repository's; all else is the version's tree's.
"""

import concurrent.futures
import dataclasses
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from bench.common.results import ROOT

FORWARD = Path("src/cuda/sm90/forward")
# What the fused forward needs besides its own folder.
SHARED_SOURCES = (
    "src/cuda/blocks/schedule.cu",
    "src/cuda/blocks/tensor_maps.cpp",
    "src/cuda/device/device.cpp",
    "src/cuda/sm90/common/forward.cpp",
    "src/cuda/sm90/common/plan.cpp",
    "src/core/error.cpp",
    "src/core/geometry.cpp",
    "src/core/pattern.cpp",
)
# And where the version has them: older ones do not.
NEWER_SOURCES = (
    "src/cuda/blocks/means.cu",
    "src/cuda/blocks/means_plan.cpp",
    "src/cuda/blocks/prefix_means.cu",
    "src/cuda/blocks/problem_params.cpp",
    "src/cuda/blocks/refusals.cpp",
    "src/cuda/blocks/window_means.cu",
)
SHIMS = ("bench/common/shim.cpp", "bench/variants/variant.cpp")

TYPES = {"bf16": "bf16", "fp16": "f16"}  # as the benchmarks call them: as DType does
PATTERNS = {"2:4": "two_of_four", "1:2": "one_of_two"}
# The one list of head dims.
_HEAD_DIMS = (ROOT / "src/cuda/tile/head_dims.h").read_text(encoding="utf-8")
DIMS = tuple(map(int, re.findall(r"\d+", re.search(r"kHeadDims\[\] = \{(.*)\}", _HEAD_DIMS)[1])))

# As src/cuda/sm90/CMakeLists.txt compiles them in a release build.
FLAGS = ("-std=c++20", "-O3", "-DNDEBUG", "-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas", "-v")
SHOWN_LINES = 12  # of what a compiler says; the rest is in a file
EXPORTS = "{ global: dspattn_bench_*; local: *; };\n"


class BuildError(Exception):
    pass


@dataclasses.dataclass(frozen=True)
class Version:
    name: str
    tree: Path
    flags: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Instance:
    type: str
    pattern: str
    dim: int

    @property
    def name(self):
        return f"fused_{TYPES[self.type]}_{PATTERNS[self.pattern]}_{self.dim}"

    @property
    def row(self):
        return f"row<DType::{TYPES[self.type]}, Selection::{PATTERNS[self.pattern]}, {self.dim}>(),\n"

    def text(self, template, general=True):
        """The source that CMake would write; without the general variant on request."""
        values = {"TYPE": TYPES[self.type], "SELECTION": PATTERNS[self.pattern], "DIM": str(self.dim)}
        text = re.sub(r"@DSPATTN_([A-Z]+)@", lambda match: values[match[1]], template)
        if general:
            return text
        text, count = re.subn(r"general_dim\((\d+)\) == \1\b", "false", text)
        if count != 1:
            raise BuildError(
                f"{FORWARD}/instance.cu.in: expected one condition on general_dim to switch off, got {count}"
            )
        return text


def parse_version(text):
    """NAME=TREE[,flag...]"""
    name, equals, rest = text.partition("=")
    tree, *flags = rest.split(",")
    if not equals or not re.fullmatch(r"[\w.+-]+", name) or not tree:
        raise ValueError(f'version: expected NAME=TREE[,flag...], got "{text}"')
    if wrong := [flag for flag in flags if not flag]:
        raise ValueError(f'version: expected a flag after every comma, got {len(wrong)} empty in "{text}"')
    path = Path(tree).expanduser()
    if not (path / FORWARD / "instance.cu.in").is_file():
        raise ValueError(f'version {name}: expected a source tree with {FORWARD}/instance.cu.in, got "{tree}"')
    return Version(name, path.resolve(), tuple(flags))


def compiler():
    """nvcc, through ccache where there is one."""
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if not nvcc:
        raise BuildError("nvcc: expected in PATH or named by CUDACXX, found neither")
    ccache = shutil.which("ccache")
    return [ccache, nvcc] if ccache else [nvcc]


def compile_command(nvcc, version, source, target, *, includes=(), checked=True, action="-c"):
    """One source to one object (action -cubin: to a cubin). `checked` fails on spills and on serialised wgmma."""
    folders = [version.tree / "include", version.tree / "src", *includes]
    return [
        *([str(ROOT / "tools" / "nvcc_checked.sh")] if checked else []),
        *nvcc, *FLAGS, *version.flags, *(f"-I{folder}" for folder in folders),
        *(["-Xcompiler", "-fPIC"] if action == "-c" else []),
        action, str(source), "-o", str(target),
    ]  # fmt: skip


def link_command(nvcc, objects, exports, target):
    """Names stay within the library, lest versions in one process take each other's."""
    return [
        *nvcc, "-shared", "-cudart", "static", "-Xlinker", "--no-undefined", "-Xlinker", f"--version-script={exports}",
        *map(str, objects), "-o", str(target),
    ]  # fmt: skip


def run(command):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{' '.join(map(str, command))}\n{result.stdout}".rstrip())


def commit_of(tree):
    """The tree's commit, -dirty where files differ from it; "unknown" outside git."""
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return result.stdout.strip() or "unknown"


def description(version, instances, general, nvcc):
    said = subprocess.run([nvcc[-1], "--version"], capture_output=True, text=True, check=False).stdout.split("\n")
    return {
        "version": version.name,
        "commit": commit_of(version.tree),
        "flags": list(version.flags),
        "instances": [instance.name for instance in instances],
        "general": general,
        "compiler": next((line for line in reversed(said) if line), "unknown"),
    }


def c_string(text):
    """A C string literal: JSON's escapes of ASCII text are C's too, but for the slash, which is not escaped here."""
    return json.dumps(text) + "\n"


def write_instance(version, instance, folder, general):
    template = (version.tree / FORWARD / "instance.cu.in").read_text(encoding="utf-8")
    source = folder / f"{instance.name}.cu"
    source.write_text(instance.text(template, general), encoding="utf-8")
    return source


def sources_of(version, instances, folder, general, facts):
    """Writes what is generated into `folder`; all sources of the library, the slowest first."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [write_instance(version, instance, folder, general) for instance in instances]
    (folder / "variant_rows.inc").write_text("".join(instance.row for instance in instances), encoding="utf-8")
    (folder / "variant_build.inc").write_text(c_string(json.dumps(facts)), encoding="utf-8")
    (folder / "exports.map").write_text(EXPORTS, encoding="utf-8")
    own = sorted(path for path in (version.tree / FORWARD).glob("*.c*") if path.suffix in (".cpp", ".cu"))
    own = [path for path in own if path.name != "rows.cpp"]  # all rows of the kernel table, compiled or not
    shared = [version.tree / name for name in SHARED_SOURCES]
    shared += [version.tree / name for name in NEWER_SOURCES if (version.tree / name).is_file()]
    return [*written, *own, *shared, *(ROOT / name for name in SHIMS)]


def build(versions, instances, out, *, general=True, checked=True, jobs=1, report=print):
    """Builds OUT/NAME.so of every version, objects in OUT/NAME; {name: error} of those that did not build."""
    nvcc = compiler()
    errors = {}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        pending = {}
        for version in versions:
            folder = Path(out) / version.name
            try:
                facts = description(version, instances, general, nvcc)
                sources = sources_of(version, instances, folder, general, facts)
            except (BuildError, OSError) as error:
                errors[version.name] = str(error)
                report(f"{version.name}: NOT built: {error}")
                continue
            # Two sources may have one name, in different folders.
            objects = [folder / f"{number}_{source.stem}.o" for number, source in enumerate(sources)]
            pending[version] = (
                objects,
                [
                    pool.submit(
                        run, compile_command(nvcc, version, source, target, includes=[folder, ROOT], checked=checked)
                    )
                    for source, target in zip(sources, objects, strict=True)
                ],
            )
        for version, (objects, compiled) in pending.items():
            target = Path(out) / f"{version.name}.so"
            target.unlink(missing_ok=True)  # a failed build leaves nothing older behind
            failures = [str(error) for error in (future.exception() for future in compiled) if error]
            if not failures:
                try:
                    run(link_command(nvcc[-1:], objects, Path(out) / version.name / "exports.map", target))
                except BuildError as error:
                    failures = [str(error)]
            if failures:
                errors[version.name] = "\n".join(failures)
                log = Path(out) / version.name / "errors.txt"
                log.write_text(errors[version.name] + "\n", encoding="utf-8")
                shown = [line[:300] for line in errors[version.name].splitlines()[:SHOWN_LINES]]
                report("\n".join([f"{version.name}: NOT built, see {log}", *shown]))
            else:
                report(f"{version.name}: {target} ({target.stat().st_size >> 10} KiB)")
    return errors
