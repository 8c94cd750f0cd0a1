"""The report on machine code: what it reads, which loop it takes for the main one, what a comparison says, and which
arrivals may overtake loads."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
MODULES = ("sass_report", "sass_arrivals", "sass")

# In cuobjdump's words. An outer loop 0x0010..0x0100 holds the main loop 0x0030..0x00e0, which holds a loop of its own
# (0x0050) without products and waits behind the end (0x0150); before it comes a product outside any inner loop, after
# it a smaller loop with one product (0x0120).
KERNEL = [
    "LDC R1, c[0x0][0x28]",  # 0x0000
    "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], !UPT",  # 0x0010
    "UIADD3 UR4, UR4, 0x1, URZ",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR6], R2",  # 0x0030
    "@!P0 BRA 0x150",
    "IADD3 R4, R4, 0x1, RZ",  # 0x0050
    "@P1 BRA 0x50",
    "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24",  # 0x0070
    "HGMMA.SP.64x64x32.F32.BF16 R24, R4, gdesc[UR8], R24, R0",
    "MUFU.EX2 R5, R6",  # 0x0090
    "@P2 BRA 0xd0",
    "FFMA R7, R7, R8, R9",
    "HMNMX2 R7, R7, R8, PT",
    "LDS.128 R12, [R3]",  # 0x00d0
    "@P3 BRA 0x30",  # 0x00e0
    "NOVEL R1",
    "@P4 BRA 0x10",  # 0x0100
    "MOV R1, R2",
    "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24",  # 0x0120
    "@P5 BRA 0x120",
    "EXIT",  # 0x0140
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR6], R2",  # 0x0150
    "@!P0 BRA 0x150",
    "BRA 0x50",
    "BRA 0x180",  # 0x0180: as the compiler fills up
]


def dump(name, lines, last_code="0x000fe20000000800"):
    text = [f"\t\tFunction : {name}", '\t.headerflags\t@"EF_CUDA_SM90"']
    for number, line in enumerate(lines):
        guard, rest = line.split(" ", 1) if line.startswith("@") else ("", line)
        text.append(f"        /*{16 * number:04x}*/ {guard:>18} {rest} ;   /* {0xA00FF017B82 + number:#018x} */")
        text.append(f"{'':60}/* {last_code if number == len(lines) - 1 else '0x000fe20000000800'} */")
    return "\n".join(["\tcode for sm_90a", *text, "\t\t..........", ""])


@pytest.fixture(autouse=True)
def tools_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def sass():
    return importlib.import_module("sass")


@pytest.fixture
def report():
    return importlib.import_module("sass_report")


@pytest.fixture
def checking():
    return importlib.import_module("sass_arrivals")


def kernels(sass, text):
    return {name: sass.Kernel(name, found, 168, 0, 16) for name, found in sass.parse_sass(text).items()}


def test_instructions_are_read(sass):
    found = sass.parse_sass(dump("a", KERNEL) + dump("b", KERNEL[:2]))
    assert [len(found[name]) for name in "ab"] == [len(KERNEL), 2]
    branch = found["a"][4]
    assert (branch.address, branch.guard, branch.opcode, branch.target) == (0x40, "@!P0", "BRA", 0x150)
    assert branch.falls_through and not found["a"][23].falls_through and not found["a"][20].falls_through
    assert len(branch.code) == 2


def test_resources_and_barriers_are_read(sass):
    usage = "Resource usage:\n Common:\n  GLOBAL:0\n Function _Zab:\n  REG:168 STACK:8 SHARED:1024 LOCAL:0\n"
    assert sass.parse_resources(usage) == {"_Zab": (168, 8)}
    elf = (
        ".nv.info._Zab\n\t<0x1>\n\tAttribute:\tEIATTR_MAXREG_COUNT\n\tFormat:\tEIFMT_HVAL\n\tValue:\t0xa8\n"
        "\tAttribute:\tEIATTR_NUM_BARRIERS\n\tFormat:\tEIFMT_BVAL\n\tValue:\t0x10\n.text._Zab\n\tValue:\t0x3\n"
    )
    assert sass.parse_barriers(elf) == {"_Zab": 16}


def test_the_main_loop_is_the_innermost_with_the_most_products(sass, report):
    loop = report.main_loop(sass.parse_sass(dump("a", KERNEL))["a"])
    assert (loop.first, loop.last, loop.tensor) == (0x30, 0xE0, 2)
    # The shortest way goes through the inner loop once, neither waits nor runs what 0xa0 jumps over.
    assert loop.shortest == {"tensor": 2, "mufu": 1, "alu": 1, "lsu": 2, "control": 4}
    assert loop.all == {"tensor": 2, "mufu": 1, "alu": 1, "lsu": 3, "control": 6, "fma": 1, "half": 1}
    assert not loop.unknown


def test_more_products_elsewhere_make_another_loop_the_main_one(sass, report):
    product = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24"
    lines = [*KERNEL[:18], "NOP", product, product, product, "@P5 BRA 0x120", "EXIT"]
    lines[4] = "NOP"  # the waiting loop is gone
    loop = report.main_loop(sass.parse_sass(dump("a", lines))["a"])
    assert (loop.first, loop.tensor) == (0x120, 3)


def test_an_unknown_instruction_is_named(sass, report):
    lines = [*KERNEL]
    lines[11] = "NOVEL R1"
    loop = report.main_loop(sass.parse_sass(dump("a", lines))["a"])
    assert loop.unknown == {"NOVEL"} and loop.all["other"] == 1
    assert "  other: NOVEL" in report.loop_lines(loop)


def test_a_kernel_without_products_has_no_main_loop(sass, report):
    assert report.main_loop(sass.parse_sass(dump("a", ["IADD3 R4, R4, 0x1, RZ", "@P0 BRA 0x0", "EXIT"]))["a"]) is None


def test_a_moved_rejoin_is_followed(sass, report):
    """BSYNC behind the end goes back to where BSSY said: without that edge there would be no loop."""
    lines = [
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24",
        "BSSY B0, 0x40",
        "BRA 0x60",
        "EXIT",
        "@P0 BRA 0x0",
        "EXIT",
        "BSYNC B0",
    ]
    loop = report.main_loop(sass.parse_sass(dump("a", lines))["a"])
    assert (loop.first, loop.last, loop.all.total()) == (0, 0x40, 5)


def test_spills_are_counted(sass):
    kernel = sass.Kernel("a", sass.parse_sass(dump("a", ["STL [R1], R2", "LDL R2, [R1]", "EXIT"]))["a"])
    assert kernel.spills == 2 and kernel.code_bytes == 48


def test_spills_count_in_loops_with_products_alone(sass, report, monkeypatch, capsys):
    """A spill outside any loop, one in the outer loop, and one in the main loop."""
    for at, found in ((0, 0), (2, 0), (13, 1)):
        lines = [*KERNEL]
        lines[at] = "LDL R2, [R1]"
        loaded = kernels(sass, dump("a", lines))
        assert report.spills_in_loops(loaded["a"].instructions) == found
        monkeypatch.setattr(report, "load", lambda file, loaded=loaded: loaded)
        assert report.main(["--spills", "a.cubin"]) == found
        assert ("1 loads and stores" in capsys.readouterr().out) == bool(found)
    assert report.spills_in_loops([]) == 0


def test_a_comparison_tells_same_from_different(sass, report):
    before = kernels(sass, dump("a", KERNEL) + dump("b", KERNEL) + dump("gone", KERNEL))
    changed = [*KERNEL]
    changed[9] = "FMUL R5, R6, R7"
    after = kernels(sass, dump("a", KERNEL) + dump("b", changed))
    lines, same = report.difference(before, after)
    assert not same
    assert "a: same" in lines and "b: differs" in lines and "gone: only in the first" in lines
    assert any(line.split() == ["mufu", "1", "->", "0", "1", "->", "0"] for line in lines)
    assert report.difference(before, before)[1]


def test_a_comparison_sees_what_the_text_does_not_show(sass, report):
    """Stall counts and barriers of the scheduler are in the code words alone."""
    before = kernels(sass, dump("a", KERNEL))
    after = kernels(sass, dump("a", KERNEL, last_code="0x000fc20000000800"))
    assert not report.difference(before, after)[1]


@pytest.mark.parametrize(
    "mangled, name",
    [
        (
            "_ZN7dspattn4cuda4sm9013fused_forwardINS1_6ConfigILNS_5DTypeE2ELNS1_9SelectionE1ELi128ELNS1_7VariantE1EEEEE"
            "vNS1_11FusedParamsE",
            "fused bf16 1:2 128 narrow",
        ),
        (
            "_ZN7dspattn4cuda4sm9013fused_forwardINS1_6ConfigILNS_5DTypeE2ELNS0_6blocks9SelectionE0ELi64EXtlNS1_5BuildELNS"
            "1_7VariantE1ELb1EEEEEEEvNS1_13ForwardParamsE",
            "fused bf16 2:4 64 narrow mean",
        ),
        (
            "_ZN7dspattn4cuda4sm9013fused_forwardINS1_6ConfigILNS_5DTypeE1ELNS0_6blocks9SelectionE0ELi64EXtlNS1_5BuildEEEEE"
            "EEvNS1_13ForwardParamsE",
            "fused fp16 2:4 64 wide",
        ),
        (
            "_ZN7dspattn4cuda4sm9044_GLOBAL__N__697553bf_11_schedule_cu_b2b1d21214write_scheduleENS1_14ScheduleParamsEi",
            "write_schedule",
        ),
        ("_ZN44_GLOBAL__N__697553bf_11_schedule_cu_b2b1d2125countILi3EEEvv", "countILi3EEEvv"),
        ("_Z6kernelv", "_Z6kernelv"),
    ],
)
def test_names(sass, mangled, name):
    assert sass.short_name(mangled) == name


@pytest.mark.parametrize("option", [[], ["--arrivals"], ["--spills"]])
def test_a_missing_cuobjdump_is_told_with_the_package(report, option, monkeypatch, tmp_path, capsys):
    file = tmp_path / "a.cubin"
    file.write_bytes(b"")
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    assert report.main([*option, str(file)]) == 2
    assert "nvidia-cuda-cuobjdump" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["absent.cubin", ".,bf16,2:4", ".,int8,2:4,64"])
def test_what_is_no_file_and_no_instance_is_told(report, text, capsys):
    assert report.main([text]) == 2
    assert "TREE,TYPE,PATTERN,DIM" in capsys.readouterr().err


def test_a_comparison_takes_two(report, capsys):
    with pytest.raises(SystemExit):
        report.main(["--diff", "a"])
    assert "expected two files, got 1" in capsys.readouterr().err


# Of arrivals that may overtake loads. The scheduler's words come before the instruction: "w0" counts its result on
# scoreboard 0, "?0" waits for it.
LOAD = "w0 LDSM.16.M88.4 R8, [R4]"
USE = "?0 MOV R2, R8"
ARRIVAL = "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x8], RZ"


def scheduled(lines, name="a"):
    """The lines as cuobjdump prints them, with the scheduler's words in the code."""
    text = [f"\t\tFunction : {name}"]
    for number, line in enumerate(lines):
        scoreboard, waits = 7, 0
        while line[0] in "w?":
            word, line = line.split(" ", 1)
            if word[0] == "w":
                scoreboard = int(word[1])
            else:
                waits |= 1 << int(word[1])
        control = waits << 11 | 7 << 8 | scoreboard << 5
        text.append(f"        /*{16 * number:04x}*/                   {line} ;   /* 0x0000000000007984 */")
        text.append(f"{'':60}/* {control << 41:#018x} */")
    return "\n".join(["\tcode for sm_90a", *text, "\t\t..........", ""])


def overtaken(sass, checking, lines):
    """{address of the arrival: addresses of the loads}"""
    found = checking.overtaking_arrivals(sass.parse_sass(scheduled(lines))["a"])
    return {arrival.address: [load.address for load in loads] for arrival, loads in found}


@pytest.mark.parametrize("load", [LOAD, "w0 LDS R8, [R4+0x400]", "w0 LDS.64 R8, [R4+UR6]", "@P1 LDS R8, [R4]"])
@pytest.mark.parametrize("arrival", [ARRIVAL, "SYNCS.ARRIVE.TRANS64 RZ, [UR4], R3", "ARRIVES.LDGSTSBAR.64 [UR4]"])
def test_an_arrival_overtakes_a_load_that_nothing_waited_for(sass, checking, load, arrival):
    assert overtaken(sass, checking, [load, "MOV R2, R3", arrival, USE, "EXIT"]) == {0x20: [0]}


@pytest.mark.parametrize("wait", [USE, "?0 @P1 MOV R2, R8", "DEPBAR.LE SB0, 0x0", f"?0 {ARRIVAL}"])
def test_an_arrival_after_a_wait_overtakes_nothing(sass, checking, wait):
    assert overtaken(sass, checking, [LOAD, wait, ARRIVAL, "EXIT"]) == {}


def test_a_wait_for_another_scoreboard_is_none_for_the_load(sass, checking):
    assert overtaken(sass, checking, [LOAD, "?1 MOV R2, R3", "DEPBAR.LE SB0, 0x1", ARRIVAL, "EXIT"]) == {0x30: [0]}


def test_a_wait_on_one_of_two_ways_is_not_enough(sass, checking):
    lines = [LOAD, "@P1 BRA 0x30", USE, ARRIVAL, "EXIT"]
    assert overtaken(sass, checking, lines) == {0x30: [0]}
    lines[1] = "?0 @P1 BRA 0x30"
    assert overtaken(sass, checking, lines) == {}


def test_a_load_is_carried_round_a_loop(sass, checking):
    """The arrival comes first in the loop; the load behind it is on its way the next time round."""
    lines = ["MOV R2, R3", ARRIVAL, LOAD, "@P1 BRA 0x10", USE, "EXIT"]
    assert overtaken(sass, checking, lines) == {0x10: [0x20]}
    lines[3] = "?0 @P1 BRA 0x10"
    assert overtaken(sass, checking, lines) == {}


def test_loads_return_in_order(sass, checking):
    """A load without a scoreboard has returned when a later one has, on every way."""
    first = "LDS R8, [R4]"
    second = "w1 LDS R9, [R4+0x4]"
    assert overtaken(sass, checking, [first, second, "?1 MOV R2, R9", ARRIVAL, "EXIT"]) == {}
    assert overtaken(sass, checking, [second, first, "?1 MOV R2, R9", ARRIVAL, "EXIT"]) == {0x30: [0x10]}
    guarded = [first, "w1 @P1 LDS R9, [R4+0x4]", "?1 MOV R2, R9", ARRIVAL, "EXIT"]
    assert overtaken(sass, checking, guarded) == {0x30: [0]}
    assert overtaken(sass, checking, [first, "@P1 BRA 0x30", second, "?1 MOV R2, R9", ARRIVAL, "EXIT"]) == {0x40: [0]}


@pytest.mark.parametrize("load", ["w0 LDS R8, [UR6+0x300dc]", "w0 LDS.64 R8, [UR6]", "@!PT LDS RZ, [RZ]"])
def test_a_word_for_the_whole_warp_is_not_handed_over(sass, checking, load):
    assert overtaken(sass, checking, [load, ARRIVAL, USE, "EXIT"]) == {}


def test_a_called_function_takes_loads_along_and_brings_its_own(sass, checking):
    lines = [LOAD, "CALL.REL.NOINC 0x40", ARRIVAL, "EXIT", ARRIVAL, "w1 LDS R9, [R4]", "RET.REL.NODEC R2 0x0"]
    assert overtaken(sass, checking, lines) == {0x20: [0, 0x50], 0x40: [0]}


def run_arrivals(sass, report, monkeypatch, *texts, option=()):
    monkeypatch.setattr(sass, "cuobjdump", lambda *arguments: texts[int(arguments[-1])])
    return report.main(["--arrivals", *option, *map(str, range(len(texts)))])


def test_both_are_found_in_one_pass(sass, report, monkeypatch, capsys):
    """A spill in the main loop of a kernel without arrivals, beside one that only arrives."""
    lines = [*KERNEL]
    lines[13] = "LDL R2, [R1]"
    arrives = scheduled(["SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ", "EXIT"], name="arrives")
    assert run_arrivals(sass, report, monkeypatch, arrives, dump("spills", lines)) == 0
    capsys.readouterr()
    assert run_arrivals(sass, report, monkeypatch, arrives, dump("spills", lines), option=["--spills"]) == 1
    assert "spills: 1 loads and stores of spilled registers" in capsys.readouterr().out


def test_arrivals_that_overtake_fail_the_run(sass, report, monkeypatch, capsys):
    good = scheduled([LOAD, USE, ARRIVAL, "EXIT"], "good")
    bad = scheduled([*[LOAD] * 6, ARRIVAL, "EXIT"], "bad")
    assert run_arrivals(sass, report, monkeypatch, good) == 0
    assert "0 of 1 arrivals may overtake" in capsys.readouterr().out
    assert run_arrivals(sass, report, monkeypatch, good, bad) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "=== 1" and out[1].startswith("bad: 1 arrivals") and out[-1].startswith("1 of 2 arrivals")
    assert "    0x0 LDSM.16.M88.4 R8, [R4]" in out and "    and 2 more" in out
    assert run_arrivals(sass, report, monkeypatch, good, bad, option=["--kernel", "good"]) == 0


def test_a_kernel_for_two_architectures_is_two_kernels(sass, report, monkeypatch):
    text = scheduled([LOAD, "EXIT"]) + scheduled([ARRIVAL, "EXIT"])
    assert run_arrivals(sass, report, monkeypatch, text) == 0


@pytest.mark.parametrize(
    "text, told", [("", "no machine code"), (scheduled([LOAD, USE, "EXIT"]), "nothing was checked")]
)
def test_what_holds_no_arrival_does_not_pass(sass, report, text, told, monkeypatch, capsys):
    assert run_arrivals(sass, report, monkeypatch, text) == 2
    assert told in capsys.readouterr().err
