"""dspattn run: results against plain NumPy, file types and layouts, and every kind of file it must refuse."""

import io
import os
import shlex
import signal
import subprocess

import numpy as np
import pytest
from attention import attention

RNG = np.random.default_rng(2024)


def draw(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


@pytest.fixture
def save(tmp_path):
    def save_array(name, array):
        np.save(tmp_path / name, array)
        return name

    return save_array


@pytest.fixture
def qkv(save):
    """Saves q, k, v of [2, 4, 50, 24] and returns the arrays."""
    arrays = [draw(2, 4, 50, 24) for _ in range(3)]
    for name, array in zip("qkv", arrays, strict=False):
        save(f"{name}.npy", array)
    return arrays


FILES = ["q.npy", "k.npy", "v.npy", "--out", "o.npy"]


def run_ok(dspattn, *extra):
    result = dspattn("run", *FILES, *extra)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.startswith("o.npy: ")


@pytest.mark.parametrize("pattern", ["2:4", "1:2", "4:8", "1:16", "dense"])
@pytest.mark.parametrize("grouping", ["interleaved", "consecutive"])
def test_round_trip_against_numpy(dspattn, qkv, tmp_path, pattern, grouping):
    run_ok(dspattn, "--pattern", pattern, "--grouping", grouping, "--lse", "lse.npy")
    keep, group = (1, 1) if pattern == "dense" else map(int, pattern.split(":"))
    out, lse = attention(*qkv, keep=keep, group=group, grouping=grouping)
    stored = np.load(tmp_path / "o.npy")
    assert stored.dtype == np.float32
    np.testing.assert_allclose(stored, out, atol=2e-5)
    np.testing.assert_allclose(np.load(tmp_path / "lse.npy"), lse, atol=2e-5)


def test_rest_to_the_mean_against_numpy(dspattn, qkv, save, tmp_path):
    visible = RNG.random((2, 1, 1, 50)) < 0.8
    save("mask.npy", visible)
    run_ok(dspattn, "--rest", "mean", "--grouping", "consecutive", "--mask", "mask.npy", "--lse", "lse.npy")
    seen = np.swapaxes(visible, -1, -2)
    mean = (qkv[2].astype(np.float64) * seen).sum(-2, keepdims=True) / seen.sum(-2, keepdims=True)
    out, lse = attention(*qkv, grouping="consecutive", visible=visible, mean=mean)
    np.testing.assert_allclose(np.load(tmp_path / "o.npy"), out, atol=2e-5)
    np.testing.assert_allclose(np.load(tmp_path / "lse.npy"), lse, atol=2e-5)
    save("mask.npy", np.ones((50, 50), bool))
    result = dspattn("run", *FILES, "--rest", "mean", "--mask", "mask.npy")
    assert result.returncode == 2
    assert "--mask shape[2]: expected 1 with rest = mean" in result.stderr


def test_masks_scale_and_empty_rows(dspattn, qkv, save, tmp_path):
    visible = RNG.random((2, 1, 50, 50)) < 0.6
    visible[0, :, 7] = False
    bias = draw(1, 4, 1, 50)
    save("visible.npy", visible)
    save("bias.npy", bias)
    run_ok(
        dspattn,
        "--mask",
        "visible.npy",
        "--bias",
        "bias.npy",
        "--key-lengths",
        "50,31",
        "--causal",
        "--window-left",
        "20",
        "--scale",
        "0.3",
        "--lse",
        "lse.npy",
    )
    i, j = np.arange(50)[:, None], np.arange(50)[None, :]
    hidden = visible & (j <= i) & (j >= i - 20) & (j < np.array([50, 31])[:, None, None, None])
    out, lse = attention(*qkv, scale=0.3, visible=hidden, bias=bias)
    np.testing.assert_allclose(np.load(tmp_path / "o.npy"), out, atol=2e-5)
    stored = np.load(tmp_path / "lse.npy")
    assert np.all(np.isneginf(stored[0, :, 7])) and np.all(np.load(tmp_path / "o.npy")[0, :, 7] == 0)
    np.testing.assert_allclose(stored, lse, atol=2e-5)


def test_cross_attention_with_fewer_key_heads_and_both_alignments(dspattn, save, tmp_path):
    q, k, v = draw(1, 6, 9, 16), draw(1, 2, 40, 16), draw(1, 2, 40, 8)
    for name, array in zip("qkv", (q, k, v), strict=False):
        save(f"{name}.npy", array)
    i, j = np.arange(9)[:, None], np.arange(40)[None, :]
    moved = ["--top-left", "--offset", "7"], ["--offset", "-35"]
    for flag, position in ([], i + 31), (["--top-left"], i), (moved[0], i + 7), (moved[1], i - 4):
        run_ok(dspattn, "--causal", *flag)
        out, _ = attention(q, np.repeat(k, 3, axis=1), np.repeat(v, 3, axis=1), visible=j <= position)
        np.testing.assert_allclose(np.load(tmp_path / "o.npy"), out, atol=2e-5)


def test_packed_batch_counts_from_each_start(dspattn, save, tmp_path):
    q, k, v = (draw(2, 30, 8) for _ in range(3))
    for name, array in zip("qkv", (q, k, v), strict=False):
        save(f"{name}.npy", array)
    run_ok(dspattn, "--cu-q", "0,11,11,30", "--causal", "--grouping", "consecutive")
    stored = np.load(tmp_path / "o.npy")
    assert stored.shape == (2, 30, 8)
    for begin, end in (0, 11), (11, 30):
        part = slice(begin, end)
        visible = np.tri(end - begin, dtype=bool)
        out, _ = attention(q[:, part], k[:, part], v[:, part], grouping="consecutive", visible=visible)
        np.testing.assert_allclose(stored[:, part], out, atol=2e-5)


def test_layout_with_heads_after_positions(dspattn, qkv, save, tmp_path):
    for name, array in zip("qkv", qkv, strict=False):
        save(f"{name}.npy", np.ascontiguousarray(array.swapaxes(1, 2)))
    run_ok(dspattn, "--layout", "bnhd")
    out, _ = attention(*qkv)
    np.testing.assert_allclose(np.load(tmp_path / "o.npy"), out.swapaxes(1, 2), atol=2e-5)


@pytest.mark.parametrize("rank", [2, 3])
def test_leading_dimensions_may_be_left_out(dspattn, save, tmp_path, rank):
    arrays = [draw(*(3, 20, 8)[3 - rank :]) for _ in range(3)]
    for name, array in zip("qkv", arrays, strict=False):
        save(f"{name}.npy", array)
    run_ok(dspattn, "--lse", "lse.npy")
    out, lse = attention(*arrays)
    np.testing.assert_allclose(np.load(tmp_path / "o.npy"), out, atol=2e-5)
    np.testing.assert_allclose(np.load(tmp_path / "lse.npy"), lse, atol=2e-5)


def test_fortran_order_big_endian_and_format_versions(dspattn, qkv, tmp_path):
    variants = [np.asfortranarray(qkv[0]), qkv[1].astype(">f4"), qkv[2]]
    for name, version, array in zip("qkv", [(1, 0), (2, 0), (3, 0)], variants, strict=False):
        with open(tmp_path / f"{name}.npy", "wb") as file:
            np.lib.format.write_array(file, array, version=version)
    run_ok(dspattn)
    np.testing.assert_allclose(np.load(tmp_path / "o.npy"), attention(*qkv)[0], atol=2e-5)


def to_bf16_bits(array):
    return (np.asarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bf16_bits(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("kind", ["fp16", "bf16 as <V2", "bf16 as integers"])
def test_16_bit_types(dspattn, qkv, save, tmp_path, kind):
    if kind == "fp16":
        stored = [array.astype(np.float16) for array in qkv]
        values = [array.astype(np.float64) for array in stored]
    else:
        stored = [to_bf16_bits(array) for array in qkv]
        values = [from_bf16_bits(array) for array in stored]
        if kind == "bf16 as <V2":
            stored = [array.view("V2") for array in stored]
    for name, array in zip("qkv", stored, strict=False):
        save(f"{name}.npy", array)
    run_ok(dspattn, "--pattern", "dense", *(["--dtype", "bf16"] if kind == "bf16 as integers" else []))
    result = np.load(tmp_path / "o.npy")
    if kind == "fp16":
        assert result.dtype == np.float16
    else:
        assert result.dtype == np.dtype("V2")
        result = from_bf16_bits(result.view(np.uint16))
    # Half a unit in the last place of the stored type, for values around 1.
    np.testing.assert_allclose(result, attention(*values, keep=1, group=1)[0], atol=1e-3 if kind == "fp16" else 8e-3)


def test_a_bias_of_bf16_bits_as_the_other_files(dspattn, qkv, save, tmp_path):
    for name, array in zip("qkv", qkv, strict=True):
        save(f"{name}.npy", to_bf16_bits(array))
    bias = to_bf16_bits(draw(1, 1, 50, 50))
    results = []
    for stored in (bias, bias.view("V2")):
        save("bias.npy", stored)
        run_ok(dspattn, "--dtype", "bf16", "--bias", "bias.npy")
        results.append((tmp_path / "o.npy").read_bytes())
    assert results[0] == results[1]


def test_no_keys_and_no_queries(dspattn, save, tmp_path):
    save("q.npy", draw(1, 2, 5, 8))
    save("k.npy", draw(1, 2, 0, 8))
    save("v.npy", draw(1, 2, 0, 8))
    run_ok(dspattn)
    assert np.all(np.load(tmp_path / "o.npy") == 0)
    save("q.npy", draw(1, 2, 0, 8))
    run_ok(dspattn)
    assert np.load(tmp_path / "o.npy").shape == (1, 2, 0, 8)


def test_results_do_not_depend_on_the_number_of_threads(dspattn, qkv, tmp_path):
    stored = []
    for threads in 1, 2, 5:
        run_ok(dspattn, "--threads", threads)
        stored.append((tmp_path / "o.npy").read_bytes())
    assert stored[0] == stored[1] == stored[2]


def test_a_result_that_cannot_be_written_leaves_no_other(dspattn, qkv, save, tmp_path):
    """--out is as it was when --lse fails, and nothing half-written stays behind."""
    save("o.npy", np.arange(3))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "folder").mkdir()
    for lse in "absent/lse.npy", "folder":
        result = dspattn("run", *FILES, "--lse", lse)
        assert result.returncode == 2
        assert result.stderr.startswith(f'dspattn: --lse: expected a file that can be written, got "{lse}": ')
    assert dspattn("run", *FILES, "--lse", "./o.npy").returncode == 2
    (tmp_path / "link.npy").symlink_to("o.npy")
    result = dspattn("run", *FILES, "--lse", "link.npy")
    assert result.returncode == 2 and '--lse: expected another place than --out, got "link.npy"' in result.stderr
    (tmp_path / "link.npy").unlink()
    (tmp_path / "folder").rmdir()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_results_replace_files_and_follow_links_and_devices_stay(dspattn, qkv, save, tmp_path):
    save("target.npy", np.arange(3))
    (tmp_path / "o.npy").symlink_to("target.npy")
    run_ok(dspattn, "--lse", "/dev/null")
    np.testing.assert_allclose(np.load(tmp_path / "target.npy"), attention(*qkv)[0], atol=2e-5)
    assert (tmp_path / "o.npy").is_symlink()
    assert os.path.exists("/dev/null") and not os.path.isfile("/dev/null")
    assert not list(tmp_path.glob("*.partial"))


def test_a_file_keeps_its_permissions(dspattn, qkv, save, tmp_path):
    save("o.npy", np.arange(3))
    (tmp_path / "o.npy").chmod(0o600)
    run_ok(dspattn)
    assert (tmp_path / "o.npy").stat().st_mode & 0o777 == 0o600
    np.testing.assert_allclose(np.load(tmp_path / "o.npy"), attention(*qkv)[0], atol=2e-5)


def test_files_beside_the_results_are_left_alone(dspattn, qkv, tmp_path):
    (tmp_path / "o.npy.partial").write_text("another program's")
    (tmp_path / "o.npy.partial1").mkdir()
    for _ in range(2):  # the second one replaces what the first has written
        assert dspattn("run", *FILES).returncode == 0
        np.testing.assert_allclose(np.load(tmp_path / "o.npy"), attention(*qkv)[0], atol=2e-5)
    assert (tmp_path / "o.npy.partial").read_text() == "another program's"
    assert sorted(path.name for path in tmp_path.glob("o.npy*")) == ["o.npy", "o.npy.partial", "o.npy.partial1"]


def test_a_killed_run_is_in_nobodys_way(dspattn, program, qkv, save, tmp_path):
    """Killed while it writes, by the limit on a file's size: no half of a result stays, or the next run says so."""
    save("o.npy", np.arange(3))
    before = (tmp_path / "o.npy").read_bytes()
    limited = f"ulimit -f 1 -c 0; exec {shlex.quote(str(program))} run {' '.join(FILES)}"
    killed = subprocess.run(["bash", "-c", limited], cwd=tmp_path, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGXFSZ and (tmp_path / "o.npy").read_bytes() == before
    left = [path.name for path in tmp_path.glob("*o.npy?*")]
    again = dspattn("run", *FILES)
    assert again.returncode == 0
    np.testing.assert_allclose(np.load(tmp_path / "o.npy"), attention(*qkv)[0], atol=2e-5)
    assert again.stderr == "".join(f"dspattn: --out: {name} stays, perhaps of a run that was killed\n" for name in left)
    assert [path.name for path in tmp_path.glob("*o.npy?*")] == left


def test_an_unwritable_place_is_noticed_before_the_work(dspattn):
    """The inputs are not even looked for."""
    result = dspattn("run", "q.npy", "k.npy", "v.npy", "--out", "no/such/folder/o.npy")
    assert result.returncode == 2
    assert result.stderr == (
        'dspattn: --out: expected a file that can be written, got "no/such/folder/o.npy": No such file or directory\n'
    )


def test_results_on_standard_output(program, qkv, tmp_path):
    result = subprocess.run([program, "run", *FILES[:3], "--out", "-"], cwd=tmp_path, capture_output=True)
    assert result.returncode == 0, result.stderr
    np.testing.assert_allclose(np.load(io.BytesIO(result.stdout)), attention(*qkv)[0], atol=2e-5)
    assert result.stderr.startswith(b"-: [2, 4, 50, 24] fp32") and not (tmp_path / "-").exists()


@pytest.mark.parametrize("kind", [np.uint8, np.int64])
def test_masks_of_integers(dspattn, qkv, save, tmp_path, kind):
    """Anything but 0 is visible, as NumPy has it."""
    visible = RNG.random((2, 1, 50, 50)) < 0.6
    save("visible.npy", visible.astype(kind) * (200 if kind == np.uint8 else 1 << 40))
    run_ok(dspattn, "--mask", "visible.npy")
    np.testing.assert_allclose(np.load(tmp_path / "o.npy"), attention(*qkv, visible=visible)[0], atol=2e-5)


def npy_bytes(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


GOOD = npy_bytes(np.zeros((2, 4, 50, 24), np.float32))


def with_header(text):
    header = text.encode("latin1")
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


BAD_FILES = {
    "empty": (b"", "expected a .npy file"),
    "text": (b"hello, this is no array at all", "does not start with"),
    "version": (b"\x93NUMPY\x09\x00" + GOOD[8:], "version: expected 1, 2 or 3, got 9"),
    "no length": (b"\x93NUMPY\x01\x00", "truncated"),
    "header cut": (GOOD[:40], "header length"),
    "header of 4 GB": (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + GOOD[10:], "header length"),
    "data cut": (GOOD[:-1], "truncated: expected 38400 bytes of data for shape (2, 4, 50, 24), got 38399"),
    "data too long": (GOOD + b"\0", "too long: expected 38400 bytes"),
    "huge": (
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (4000000000, 4000000000), }"),
        "larger than any file",
    ),
    "a terabyte": (
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000), }"),
        "truncated: expected 4000000000000 bytes",
    ),
    "negative": (
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 4), }"),
        "expected a length that is not negative",
    ),
    "no shape": (with_header("{'descr': '<f4', 'fortran_order': False, }"), "no shape"),
    "no dictionary": (with_header("[1, 2]"), 'expected "{"'),
    "unknown key": (with_header("{'descr': '<f4', 'color': 'blue'}"), '"color"'),
    "structured": (with_header("{'descr': [('x', '<f4')], 'fortran_order': False, 'shape': (1,)}"), "structured type"),
    "float64": (npy_bytes(np.zeros((50, 24))), 'got "<f8"; save it as float32'),
    "complex": (npy_bytes(np.zeros((50, 24), np.complex64)), 'got "<c8"'),
    "pickled": (npy_bytes(np.array([[None]])), 'got "|O"'),
    "integers": (npy_bytes(np.zeros((50, 24), np.int32)), "expected float32, float16 or bfloat16, got int32"),
    "uint16": (npy_bytes(np.zeros((50, 24), np.uint16)), "--dtype bf16"),
    "one dimension": (npy_bytes(np.zeros(24, np.float32)), "expected [n, d] or more dimensions, got shape [24]"),
    "five dimensions": (npy_bytes(np.zeros((1, 1, 1, 2, 3), np.float32)), "expected at most 4 dimensions"),
    "other rank": (npy_bytes(np.zeros((50, 24), np.float32)), "the same number of dimensions"),
    "other d": (npy_bytes(np.zeros((2, 4, 50, 23), np.float32)), "23"),
    "other type": (npy_bytes(np.zeros((2, 4, 50, 24), np.float16)), "fp16"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_files_are_refused_by_name(dspattn, qkv, tmp_path, kind):
    content, message = BAD_FILES[kind]
    (tmp_path / "k.npy").write_bytes(content)
    result = dspattn("run", *FILES)
    assert result.returncode == 2
    assert message in result.stderr
    if kind not in ("other rank", "other d", "other type"):
        assert "k.npy" in result.stderr
    assert not (tmp_path / "o.npy").exists()


@pytest.mark.parametrize(
    "extra, code, message",
    [
        (["--pattern", "5:4"], 2, '"5:4"'),
        (["--grouping", "random"], 2, '"random"'),
        (["--rest", "median"], 2, '--rest: expected drop or mean, got "median"'),
        (["--layout", "hbnd"], 2, '"hbnd"'),
        (["--dtype", "fp16"], 2, "expected fp16 as --dtype says, got fp32"),
        (["--scale", "0"], 2, "scale"),
        (["--scale", "nan"], 2, "scale"),
        (["--window-left", "-1"], 2, "--window-left: expected >= 0, got -1"),
        (["--key-lengths", "1,x"], 2, "--key-lengths"),
        (["--key-lengths", "1,2,3"], 2, "--key-lengths shape[0]: expected batch = 2, got 3"),
        (["--key-lengths", "50,51"], 2, "--key-lengths[1]: expected a length from 0 to"),
        (["--key-lengths", ""], 2, '--key-lengths: expected a value, got ""'),
        (["--cu-q", ""], 2, '--cu-q: expected a value, got ""'),
        (["--mask", ""], 2, '--mask: expected a value, got ""'),
        (["--kernel", ""], 2, '--kernel: expected a value, got ""'),
        (["--key-lengths", "q.npy"], 2, "expected integers of one dimension"),
        (["--cu-q", "0,9,4"], 2, "--cu-q[2]: expected at least the value before it, 9, got 4"),
        (["--mask", "q.npy"], 2, "--mask: q.npy: expected bool or integers, got fp32; --bias takes"),
        (["--mask", "small.npy"], 2, "--mask shape[3]: expected 1 or n_k = 50, got 3"),
        (["--bias", "small.npy"], 2, "--bias dtype: expected fp32 or q's type fp32, got bool"),
        (["--bias", "missing.npy"], 2, "--bias: missing.npy: no such file"),
        (["--kernel", "imaginary"], 2, "--kernel: expected one of "),
        (["--kernel", "cpu_1_2"], 2, "kernel cpu_1_2 cannot serve: --pattern: "),
        (["--threads", "-3"], 2, "--threads: expected >= 0, got -3"),
        (["--out", "no/such/folder/o.npy"], 2, "--out"),
        (["--lse", "no/such/folder/lse.npy"], 2, '--lse: expected a file that can be written, got "no/such/folder'),
        (["--lse", "/dev/full"], 3, "--lse: /dev/full: could not be written in full"),
    ],
)
def test_bad_options_are_named(dspattn, qkv, save, extra, code, message):
    save("small.npy", np.ones((1, 1, 1, 3), bool))
    result = dspattn("run", *FILES, *extra)
    assert result.returncode == code, result.stderr
    assert message in result.stderr


def test_missing_file_folder_and_option(dspattn, qkv, tmp_path):
    (tmp_path / "k.npy").unlink()
    assert "k.npy: no such file" in dspattn("run", *FILES).stderr
    (tmp_path / "k.npy").mkdir()
    assert "k.npy: expected a regular file" in dspattn("run", *FILES).stderr
    result = dspattn("run", "q.npy", "k.npy", "v.npy")
    assert result.returncode == 2
    assert "--out is required" in result.stderr
