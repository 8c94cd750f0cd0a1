"""What git tracks was written by hand or measured: nothing that a compiler, a linker or Python made."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MADE = (
    b"\x7fELF",  # programs, objects and shared libraries
    b"!<arch>\n",  # archives
    b"!<thin>\n",
    b"\xfe\xed\xfa\xce",  # Mach-O
    b"\xfe\xed\xfa\xcf",
    b"\xce\xfa\xed\xfe",
    b"\xcf\xfa\xed\xfe",
    b"MZ",  # Windows
    b"\x50\xed\x55\xba",  # a fat binary of CUDA
    b"CPCH",  # precompiled headers
    b"gpch",
)
SUFFIXES = {".a", ".cubin", ".dll", ".dylib", ".egg", ".exe", ".fatbin", ".gch", ".lib", ".o", ".obj", ".pch", ".ptx"}
SUFFIXES |= {".pyc", ".pyd", ".so", ".whl"}


def is_made(name, begins):
    return bool(SUFFIXES & set(Path(name).suffixes)) or begins.startswith(MADE)


def begin_of(path):
    with path.open("rb") as file:
        return file.read(16)


def test_git_tracks_nothing_that_was_built():
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    names = [name for name in listed.decode().split("\0") if name]
    assert names
    files = [(name, ROOT / name) for name in names]
    assert not [name for name, path in files if path.is_file() and is_made(name, begin_of(path))]


@pytest.mark.parametrize(
    "name, begins, made",
    [
        ("a.out", b"\x7fELF\x02\x01\x01", True),
        ("libdspattn.so.0", b"", True),
        ("part", b"!<arch>\n/    ", True),
        ("README.md", b"# dspattn", False),
        ("picture.png", b"\x89PNG\r\n", False),
    ],
)
def test_what_is_built_is_recognised(name, begins, made):
    assert is_made(name, begins) == made
