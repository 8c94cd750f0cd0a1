"""The include-direction check: passes on this repository, fails on each kind of wrong include."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "tools" / "check_includes.py"
sys.path.insert(0, str(CHECK.parent))

import check_includes  # noqa: E402


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
            {"src/cuda/blocks/a.h": '#include "cuda/sm90/forward/b.h"\n', "src/cuda/sm90/forward/b.h": ""},
            '"cuda/sm90/forward/b.h" is of layer cuda/sm90/forward; cuda/blocks may include cuda/blocks, public, core',
        ),
        (
            {"src/cuda/tile/a.h": '#include "cuda/device/b.h"\n', "src/cuda/device/b.h": ""},
            '"cuda/device/b.h" is of layer cuda/device',
        ),
        (
            {"src/cuda/pipeline/sm80/a.h": '#include "cuda/pipeline/sm90/b.h"\n', "src/cuda/pipeline/sm90/b.h": ""},
            '"cuda/pipeline/sm90/b.h" is of layer cuda/pipeline/sm90',
        ),
        (
            {"src/cuda/sm90/forward_tf32/a.h": '#include "cuda/sm90/forward/b.h"\n', "src/cuda/sm90/forward/b.h": ""},
            '"cuda/sm90/forward/b.h" is of layer cuda/sm90/forward',
        ),
        (
            {"src/cuda/sm90/common/a.h": '#include "cuda/rows.h"\n', "src/cuda/rows.h": ""},
            '"cuda/rows.h" is of layer cuda; cuda/sm90/common may include',
        ),
        (
            {"src/api/a.cpp": '#include "cuda/sm90/forward/b.h"\n', "src/cuda/sm90/forward/b.h": ""},
            '"cuda/sm90/forward/b.h" is of layer cuda/sm90/forward; api may include',
        ),
        ({"src/cuda/sm90/decode/a.h": ""}, "src/cuda/sm90/decode/a.h: in no layer; add its folder to LAYERS"),
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


def test_layers_of_a_folder_pass(tmp_path):
    files = {
        "src/cuda/rows.cpp": '#include "cuda/sm90/forward/a.h"\n',
        "src/cuda/sm90/forward/a.h": '#include "cuda/blocks/b.h"\n#include <cuda.h>\n',
        "src/cuda/pipeline/a.cpp": '#include "cuda/pipeline/sm80/c.h"\n',
        "src/cuda/pipeline/sm80/c.h": "",
        "src/cuda/blocks/b.h": "",
        "tests/cuda/d.cpp": '#include "cuda/blocks/b.h"\n',
    }
    result = run(tree(tmp_path, files))
    assert result.returncode == 0, result.stderr
    assert "6 files" in result.stdout


def test_no_circle_is_possible():
    layers = list(check_includes.LAYERS)
    for i, layer in enumerate(layers):
        granted = [other for other in layers if check_includes.grants(layer, other)]
        assert set(granted) <= set(layers[:i]), layer
        exact = [name for name in check_includes.LAYERS[layer][1] if not name.endswith("/*")]
        assert set(exact) <= set(granted), layer


def test_empty_tree_is_no_success(tmp_path):
    assert run(tmp_path).returncode == 1
