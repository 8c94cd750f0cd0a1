"""What all benchmarks stand on: the C interface on the CPU, tables written into pages, result files."""

import sys
import types

import pytest

from bench.common import pages, results

torch = pytest.importorskip("torch")
from bench.common import native, timing  # noqa: E402
from bench.pipeline.problem import Pipeline  # noqa: E402


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_the_forward_of_the_shim_is_attention():
    """Every field of the call where shim.h expects it: shapes, strides, masks, lengths."""
    q, k, v = (draw(2, 40, 3, 16).transpose(1, 2) for _ in range(3))
    lengths = torch.tensor([40, 25], dtype=torch.int32)
    bias = draw(1, 3, 40, 40)
    run, out, lse = native.prepare(q, k, v, pattern=(1, 1), causal=True, scale=0.3, key_lengths=lengths, bias=bias)
    run()
    hidden = torch.arange(40) >= torch.minimum(torch.arange(40)[:, None] + 1, lengths[:, None, None, None])
    scores = (0.3 * q @ k.transpose(-1, -2) + bias).masked_fill(hidden, -torch.inf)
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_the_backward_of_the_shim_is_attentions():
    q, k, v = (draw(1, 2, 24, 16).requires_grad_() for _ in range(3))
    given = [t.detach() for t in (q, k, v)]
    run, out, lse = native.prepare(*given, pattern=(1, 1), causal=True, kernel="cpu_any")
    run()
    d_out = draw(1, 2, 24, 16)
    backward, *gradients = native.prepare_backward(*given, out, lse, d_out, pattern=(1, 1), causal=True)
    backward()
    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).backward(d_out)
    for ours, tensor in zip(gradients, (q, k, v), strict=True):
        torch.testing.assert_close(ours, tensor.grad)
    with pytest.raises(RuntimeError, match="kernel: expected one of"):
        native.prepare(*given, kernel="none such")


def test_the_pipeline_of_the_shim_is_its_three_stages():
    q, k, v = (draw(1, 2, 64, 16) for _ in range(3))
    stages, chain = Pipeline(None, q, k, v, (1, 2)), Pipeline(None, q, k, v, (1, 2))
    for stage in (stages.qk_prune, stages.softmax, stages.pv_sparse, chain.chain):
        stage()
    run, expected, lse = native.prepare(q, k, v, pattern=(1, 2), grouping="consecutive")
    run()
    assert torch.equal(stages.out, chain.out) and torch.equal(stages.lse, chain.lse)
    torch.testing.assert_close(chain.out, expected)
    torch.testing.assert_close(chain.lse, lse)


def test_a_block_mask_reaches_the_pipeline():
    q, k, v = (draw(1, 1, 128, 16) for _ in range(3))
    counts, columns = torch.ones(2, dtype=torch.int32), torch.tensor([[1], [0]], dtype=torch.int32)
    blocked = Pipeline(None, q, k, v, (1, 2), blocks=(64, counts, columns))
    blocked.chain()
    alone = Pipeline(None, q[:, :, :64].contiguous(), k[:, :, 64:].contiguous(), v[:, :, 64:].contiguous(), (1, 2))
    alone.chain()
    torch.testing.assert_close(blocked.out[:, :, :64], alone.out)


@pytest.mark.parametrize("offset", [0, 1, 64, 255])
def test_a_workspace_is_aligned_wherever_memory_is(monkeypatch, offset):
    memory = torch.zeros(4096, dtype=torch.uint8)
    begin = -memory.data_ptr() % 256 + offset
    monkeypatch.setattr(native.torch, "empty", lambda size, **_: memory[begin : begin + size])
    workspace = native.aligned_bytes(300, "cpu")
    assert workspace.data_ptr() % 256 == 0 and workspace.numel() == 300


def test_what_the_library_refuses_is_said():
    q, k, v = (draw(1, 2, 8, 16) for _ in range(3))
    with pytest.raises(RuntimeError, match="pattern: expected"):
        native.prepare(q, k, v, pattern=(5, 4))
    with pytest.raises(FileNotFoundError, match=r"absent\.so: no such library"):
        native.prepare(q, k, v, path="absent.so")


def test_calls_on_the_cpu_take_turns():
    order = []
    found = timing.in_turn_on_cpu({name: lambda name=name: order.append(name) for name in "ab"}, 0.0, "wall")
    assert order[:6] == list("ababab") and list(found) == ["a", "b"]
    assert timing.summary([3.0, 1.0, 2.0]) == {"median_us": 2.0, "spread_us": 2.0}


@pytest.fixture
def table(monkeypatch, tmp_path):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    results.write(tmp_path / "a.json", {"commit": "c"}, [1, 2])
    return pages.Table("page.md", "sums", "a.json", lambda result: str(sum(result["rows"])))


def test_tables_are_written_between_their_markers_and_checked(table, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- sums, written by m -->\nold\n<!-- end of sums -->\nafter\n")
    assert pages.run(["--check"], "m", table) == 1
    assert "page.md: not what a.json says; run python3 -m m" in capsys.readouterr().err
    assert pages.run([], "m", table) == 0
    assert page.read_text() == "before\n<!-- sums, written by m -->\n3\n<!-- end of sums -->\nafter\n"
    assert pages.run(["--check"], "m", table) == 0


def test_a_page_without_markers_is_told(table, tmp_path, capsys):
    (tmp_path / "page.md").write_text("nothing")
    assert pages.run([], "m", table) == 1
    assert "expected the markers <!-- sums, written by m -->" in capsys.readouterr().err


def test_a_result_file_says_how_it_was_made(monkeypatch, tmp_path):
    """The command can be given again; the file appears whole."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/bench/forward/measure.py", "--out", "a b.json"])
    spec = types.SimpleNamespace(name="bench.forward.measure")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    assert results.command() == "python3 -m bench.forward.measure --out 'a b.json'"
    spec.name = "bench.variants.__main__"
    assert results.command().startswith("python3 -m bench.variants --out ")
    monkeypatch.setenv("DSPATTN_COMMIT", "named")
    results.write(tmp_path / "a.json", {"commit": results.commit()}, [1])
    written = results.read(tmp_path / "a.json")
    assert written["commit"] == "named" and written["rows"] == [1] and written["date"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
