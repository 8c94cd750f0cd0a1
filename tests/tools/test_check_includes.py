"""The include-direction check: passes on this repository, fails on each kind of wrong include."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "tools" / "check_includes.py"


def run(root):
    return subprocess.run([sys.executable, CHECK, root], capture_output=True, text=True)


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_repository_passes():
    result = run(ROOT)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "files, message",
    [
        (
            {"src/core/a.cpp": '#include "api/b.h"\n', "src/api/b.h": ""},
            'src/core/a.cpp:1: "api/b.h" is of layer api; core may include core, public',
        ),
        (
            {"src/cpu/a.cpp": '\n#include "cuda/b.h"\n', "src/cuda/b.h": ""},
            'src/cpu/a.cpp:2: "cuda/b.h" is of layer cuda',
        ),
        (
            {"bindings/torch/a.cpp": '#include "core/b.h"\n', "src/core/b.h": ""},
            '"core/b.h" is of layer core; bindings may include bindings, public',
        ),
        (
            {"src/core/a.h": '#include "../api/b.h"\n', "src/api/b.h": ""},
            '"../api/b.h" is of layer api',
        ),
        (
            {"tests/python/a.py": "import os\nfrom bench.common import b\n"},
            "tests/python/a.py:2: tests imports nothing from",
        ),
        (
            {"experiments/a.py": "def f():\n    import tests.b\n"},
            "experiments/a.py:2: experiments imports nothing from",
        ),
        ({"python/dspattn/a.py": "from experiments import b\n"}, "python/dspattn/a.py:1: python imports nothing from"),
        ({"include/dspattn/a.h": "#include <cuda_runtime.h>\n"}, "<cuda_runtime.h> is of CUDA"),
        ({"src/api/a.cpp": "#  include <torch/library.h>\n"}, "<torch/library.h> is of torch; only bindings"),
    ],
)
def test_wrong_direction_is_named(tmp_path, files, message):
    result = run(tree(tmp_path, files))
    assert result.returncode == 1
    assert message in result.stderr


def test_right_direction_passes(tmp_path):
    files = {
        "src/api/a.cpp": '#include <vector>\n#include "core/b.h"\n#include "dspattn/c.h"\n#include "own.h"\n',
        "src/api/own.h": "",
        "src/core/b.h": "",
        "include/dspattn/c.h": "",
    }
    result = run(tree(tmp_path, files))
    assert result.returncode == 0, result.stderr
    assert "4 files" in result.stdout


def test_empty_tree_is_no_success(tmp_path):
    assert run(tmp_path).returncode == 1
