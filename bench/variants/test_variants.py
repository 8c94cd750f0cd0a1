"""Versions of the fused kernel side by side: arguments, commands, turns, comparison, and those that do not come back.

What needs a GPU is skipped without one; what needs nvcc, without that.
"""

import ctypes
import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def variants():
    return importlib.import_module("bench.variants.__main__")


@pytest.fixture
def building():
    return importlib.import_module("bench.variants.build")


@pytest.fixture
def timed():
    pytest.importorskip("torch")
    return importlib.import_module("bench.variants.timed")


# Arguments.


def test_a_cell_is_one_place(variants):
    assert variants.parse_cells("256:64:causal:2:4") == [(256, 64, "causal", "2:4")]
    assert str(variants.parse_cells("256:64:causal:2:4")[0]) == "256:64:causal:2:4"


def test_lists_in_a_cell_mean_all_combinations(variants):
    found = variants.parse_cells("256,512:64,128:full:2:4,1:2")
    assert len(found) == 8 and (512, 128, "full", "1:2") in found
    assert {place[2:] for place in variants.parse_cells("256:64")} == {
        (mask, pattern) for mask in ("full", "causal") for pattern in ("2:4", "1:2")
    }


@pytest.mark.parametrize(
    "text", ["256", "a:64", "256:64:diagonal", "256:64:full:1:4", "0:64", "256:512", "256:64:full:"]
)
def test_a_wrong_cell_is_told(variants, text):
    with pytest.raises(ValueError, match=f'cell: expected .*"{text}"'):
        variants.parse_cells(text)


def test_a_version_is_a_tree_with_flags(building):
    version = building.parse_version(f"new={ROOT},-DX=1,-Xptxas,-O2")
    assert (version.name, version.tree, version.flags) == ("new", ROOT, ("-DX=1", "-Xptxas", "-O2"))


@pytest.mark.parametrize("text", ["new", "=.", "a/b=.", "new=", f"new={ROOT},", f"new={ROOT / 'bench'}"])
def test_a_wrong_version_is_told(building, text):
    with pytest.raises(ValueError, match=r"^version.*expected"):
        building.parse_version(text)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["build", f"a={ROOT}", f"a={ROOT}"], "a more than once"),
        (["build", f"a={ROOT}", "--dims", "80"], "expected some of 32,64"),
        (["build", f"a={ROOT}", "--patterns", "1:4"], "expected some of 2:4,1:2"),
        (["time", "absent", "--dir", "/nowhere"], "whose library exists"),
        (["time", f"a={__file__}", f"a={__file__}"], "a more than once"),
        (["time", f"cudnn={__file__}"], "not cudnn"),
        (["time", f"a={__file__}", "--rounds", "0"], "at least 1"),
    ],
)
def test_wrong_arguments_are_told(variants, argv, message, capsys):
    with pytest.raises(SystemExit):
        variants.arguments_of(argv)
    assert message in capsys.readouterr().err


def test_defaults(variants):
    arguments = variants.arguments_of(["build", f"a={ROOT}"])
    assert (arguments.types, arguments.patterns, arguments.dims) == (["bf16"], ["2:4", "1:2"], [64, 128])
    arguments = variants.arguments_of(["time", f"a={__file__}", "--cells", "256:64:full:2:4", "256:64:full"])
    assert [str(place) for place in arguments.places] == ["256:64:full:2:4", "256:64:full:1:2"]
    assert arguments.idle == 0.5


# Building.


def test_an_instance_is_what_cmake_would_write(building):
    template = (ROOT / building.FORWARD / "instance.cu.in").read_text(encoding="utf-8")
    text = building.Instance("fp16", "1:2", 128).text(template)
    assert "@" not in text
    assert "launcher<DType::f16, Selection::one_of_two, 128>" in text and "general_dim(128) == 128" in text
    assert "general_dim" not in building.Instance("fp16", "1:2", 128).text(template, general=False)


def test_a_template_without_a_general_variant_to_leave_out_is_told(building):
    with pytest.raises(building.BuildError, match="general_dim"):
        building.Instance("bf16", "2:4", 64).text("nothing", general=False)


def test_the_compile_command(building):
    version = building.Version("new", Path("/tree"), ("-DX=1",))
    command = building.compile_command(["nvcc"], version, "a.cu", "a.o", includes=["/out"])
    assert command[0].endswith("tools/nvcc_checked.sh") and Path(command[0]).is_file() and command[1] == "nvcc"
    assert command[-4:] == ["-c", "a.cu", "-o", "a.o"]
    assert command.index("-DX=1") > command.index("-O3")  # a version's flags may undo the common ones
    assert [part for part in command if part.startswith("-I")] == ["-I/tree/include", "-I/tree/src", "-I/out"]
    assert command[command.index("-gencode") + 1] == "arch=compute_90a,code=sm_90a"
    assert command[command.index("-Xptxas") + 1] == "-v"  # what the check reads
    assert building.compile_command(["nvcc"], version, "a.cu", "a.o", checked=False)[0] == "nvcc"


def test_the_link_command_keeps_the_runtime_and_all_names_inside(building):
    command = building.link_command(["nvcc"], ["a.o"], "exports.map", "a.so")
    assert command[command.index("-cudart") + 1] == "static"
    assert {"-shared", "--no-undefined", "--version-script=exports.map", "a.o"} <= set(command)


def test_the_sources_are_the_trees_but_for_the_shims(building, tmp_path):
    instances = [building.Instance("bf16", pattern, 64) for pattern in building.PATTERNS]
    version = building.Version("new", ROOT)
    sources = building.sources_of(version, instances, tmp_path, True, {"said": 'with "quotes"'})
    names = [source.name for source in sources]
    assert names[:2] == ["fused_bf16_two_of_four_64.cu", "fused_bf16_one_of_two_64.cu"]
    assert {"forward.cpp", "schedule.cu", "tensor_maps.cpp", "shim.cpp", "variant.cpp"} <= set(names)
    assert "rows.cpp" not in names and all(source.is_file() for source in sources)
    assert (tmp_path / "variant_rows.inc").read_text().count("row<DType::bf16, ") == 2
    literal = (tmp_path / "variant_build.inc").read_text()
    assert json.loads(json.loads(literal)) == {"said": 'with "quotes"'}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_a_version_builds_loads_and_says_what_it_is(variants, building, tmp_path, capsys):
    """One kernel, and one version that does not compile. What runs on the host is compiled without optimisation: a
    quarter of the time."""
    torch = pytest.importorskip("torch")
    flags = ["-DANY=1", "-Xcompiler=-O0"]
    new = ",".join([f"new={ROOT}", *flags])
    argv = ["build", new, f"broken={ROOT},-include,absent.h", "--dir", str(tmp_path)]
    assert variants.main([*argv, "--patterns", "2:4", "--dims", "32", "--no-general"]) == 1
    assert "broken: NOT built" in capsys.readouterr().out and not (tmp_path / "broken.so").exists()
    path = str(tmp_path / "new.so")
    library = ctypes.CDLL(path)
    assert all(hasattr(library, f"dspattn_bench_{name}") for name in ("forward", "workspace", "build"))
    assert not hasattr(library, "cudaMalloc")  # names stay inside
    facts = importlib.import_module("bench.variants.timed").build_of(path)
    assert (facts["version"], facts["flags"], facts["general"]) == ("new", flags, False)
    assert facts["instances"] == ["fused_bf16_two_of_four_32"]
    fp32 = [torch.zeros(1, 1, 128, 64) for _ in range(3)]
    with pytest.raises(RuntimeError, match="q: takes bf16, got fp32"):
        importlib.import_module("bench.common.native").prepare(*fp32, path=path)


# Timing.


def test_contenders_take_turns_and_each_begins_once(timed):
    order = []

    def measure(name):
        order.append(name)
        return [len(order)]

    times = timed.interleaved({name: name for name in "abc"}, 4, measure)
    assert "".join(order) == "abcbcacababc"
    assert times["a"] == [1, 6, 8, 10]


def test_rows_have_ratios_to_cudnn_and_to_the_first(timed, variants):
    place = variants.Place(256, 64, "causal", "2:4")
    times = {"base": [100.0, 102.0, 98.0], "new": [50.0], "cudnn": [200.0]}
    checks = {"new": {"out": {"elements": 3, "largest": 0.5}, "lse": None, "nan": 0}}
    rows = timed.rows_of(place, {"d": 64}, 1e9, times, "base", checks)
    assert [row["version"] for row in rows] == ["base", "new", "cudnn"]
    assert rows[1]["ratio"] == {"cudnn": 4.0, "base": 2.0} and rows[1]["tflops"] == 20.0
    line = timed.line_of(place, rows[1], "base")
    assert " ".join(line.split()) == "256:64:causal:2:4 new 50.00 0.00 20.0 4.000 2.000 out differs by 0.5"
    assert len(timed.header("base")) <= len(line)
    without = timed.rows_of(place, {}, 1e9, {"base": [1.0]}, "base", {})
    assert timed.line_of(place, without[0], "base").split()[-2:] == ["-", "1.000"]


def test_results_are_compared_bit_by_bit(timed):
    import torch

    zero = torch.zeros(4, dtype=torch.bfloat16)
    lse = torch.zeros(4)
    other = zero.clone()
    other[1], other[2] = 0.5, -0.0
    unwritten = torch.full_like(lse, torch.nan)
    found = timed.compared({"a": (zero, lse), "b": (zero.clone(), lse), "c": (other, lse), "d": (zero, unwritten)})
    assert timed.verdict(found["a"]) == timed.verdict(found["b"]) == "identical"
    assert found["c"]["out"] == {"elements": 2, "largest": 0.5} and found["c"]["lse"] is None
    assert timed.verdict(found["d"]) == "lse differs by nan, 4 NaN"


CHILD = """
import json, sys, time
print("ready", flush=True)
for name in sys.argv[1:]:
    for cell in range(2):
        if name == "hangs" and cell == 1:
            time.sleep(60)
        if name == "crashes":
            sys.exit("CUDA error: an illegal memory access")
        refused = "d: not compiled" if name == "small" and cell == 0 else None
        print(json.dumps({"version": name, "cell": cell, "refused": refused}), flush=True)
"""


def test_versions_that_do_not_come_back_are_left_out(timed):
    names = ("good", "hangs", "crashes", "small")
    started = []

    def command_of(libraries):
        started.append(list(libraries))
        return [sys.executable, "-c", CHILD, *libraries]

    left_out, refused = timed.probed(dict.fromkeys(names, ""), ["first", "second"], command_of, timeout=1.0)
    assert left_out == {
        "hangs": "hangs at second: no answer within 1 s",
        "crashes": "crashes at first: CUDA error: an illegal memory access",
    }
    assert refused == {("small", "first"): "d: not compiled"}
    assert started == [list(names), ["crashes", "small"], ["small"]]


def test_a_probe_that_does_not_start_blames_no_version(timed):
    with pytest.raises(RuntimeError, match="did not start: no torch"):
        timed.probed({"a": ""}, ["first"], lambda _: [sys.executable, "-c", "exit('no torch')"], timeout=1.0)


def test_the_probe_command_is_understood(timed, variants):
    place = variants.Place(256, 64, "full", "2:4")
    command = timed.probe_command({"a": "a.so"}, [place], "bf16", "interleaved")
    arguments = variants.arguments_of(command[3:])
    request = json.loads(arguments.request)
    assert command[1:3] == ["-m", "bench.variants"] and request["libraries"] == {"a": "a.so"}
    assert variants.Place(*request["places"][0]) == place


class FakeCell:
    """A problem without a GPU: every version writes its own constant."""

    flop = 1e9

    def __init__(self, n, d, *, mask, dtype):
        self.told = {"n_q": n, "d": d, "mask": mask, "dtype": dtype}

    def facts(self):
        return self.told

    def peer(self, name):
        return [name]

    def prepared(self, path, pattern, grouping):
        import torch

        out, lse = torch.zeros(4, dtype=torch.bfloat16), torch.zeros(2)

        def run():
            out.fill_(1.0 if path == "b.so" else 0.0)
            lse.fill_(2.0)

        return [(run, out, lse)]


def test_a_whole_run(timed, variants, monkeypatch, tmp_path, capsys):
    """All but the GPU's own work: who is left out of what, the table and the file."""
    torch = timed.torch
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timed.forward, "Cell", FakeCell)
    monkeypatch.setattr(timed.results, "gpu", lambda: {"command": "the command", "device": {"name": "none"}})
    monkeypatch.setattr(timed.timing, "Graphed", lambda calls: "cudnn" if calls == ["cudnn"] else "ours")
    idles = []
    monkeypatch.setattr(
        timed.timing, "burst_times", lambda what, idle: idles.append(idle) or [{"cudnn": 3}.get(what, 2)]
    )
    monkeypatch.setattr(timed, "build_of", lambda path: {"commit": path})
    child = tmp_path / "child.py"
    child.write_text(CHILD, encoding="utf-8")
    monkeypatch.setattr(timed, "probe_command", lambda some, *_: [sys.executable, str(child), *some])
    libraries = {"hangs": "h.so", "small": "a.so", "good": "b.so"}
    out = tmp_path / "result.json"
    argv = ["time", f"x={__file__}", "--cells", "256:64:full:2:4,1:2", "--check", "--rounds", "2", "--timeout", "1"]
    arguments = variants.arguments_of([*argv, "--idle", "0.1", "--out", str(out)])
    assert timed.run(arguments, libraries, arguments.places) == 1  # one was left out
    printed = capsys.readouterr().out
    assert "hangs: left out, hangs at 256:64:full:1:2" in printed
    assert "small: d: not compiled" in printed
    result = json.loads(out.read_text(encoding="utf-8"))
    assert (result["command"], list(result["builds"])) == ("the command", ["small", "good"])
    assert list(result["left_out"]) == ["hangs"] and set(idles) == {0.1}
    # The first cell has only one version; in the second the other one is the first.
    assert [(row["pattern"], row["version"]) for row in result["rows"]] == [
        ("2:4", "good"), ("2:4", "cudnn"), ("1:2", "small"), ("1:2", "good"), ("1:2", "cudnn"),
    ]  # fmt: skip
    assert result["rows"][3]["ratio"] == {"cudnn": 1.5, "small": 1.0}
    assert result["rows"][3]["check"]["out"] == {"elements": 4, "largest": 1.0}
    assert result["rows"][3]["check"]["lse"] is None and "out differs by 1" in printed


def hopper():
    torch = pytest.importorskip("torch")
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def test_timing_without_a_hopper_gpu_is_refused(timed, variants, capsys):
    if hopper():
        pytest.skip("there is one")
    assert variants.main(["time", f"a={__file__}"]) == 2
    assert "Hopper" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_two_versions_are_timed_and_agree(variants, tmp_path):
    if not hopper():
        pytest.skip("no Hopper GPU")
    build = ["build", f"a={ROOT}", f"b={ROOT}", "--dir", str(tmp_path), "--patterns", "2:4", "--dims", "64"]
    assert variants.main([*build, "--no-general"]) == 0
    out = tmp_path / "result.json"
    time = ["time", "a", "b", "--dir", str(tmp_path), "--cells", "256:64:causal:2:4", "256:128:causal:2:4"]
    assert variants.main([*time, "--check", "--idle", "0.01", "--rounds", "2", "--out", str(out)]) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    assert [row["version"] for row in result["rows"]] == ["a", "b", "cudnn"]
    assert result["rows"][1]["check"] == {"out": None, "lse": None, "nan": 0}
    assert set(result["builds"]) == {"a", "b"}
