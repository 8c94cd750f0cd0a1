"""The operators on a GPU: PyTorch's stream, device and memory, and results that agree with the CPU's.

Skipped without a GPU. A problem that no compiled kernel serves on this GPU is skipped with the library's own reasons.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import contract
import dspattn

COMBINED = ("nystromformer", "linformer", "bigbird", "longformer")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use")


def served(*inputs: torch.Tensor, **options: Any) -> Any:
    try:
        return dspattn.attention(*inputs, **options)
    except dspattn.DspattnError as error:
        if all(reason.startswith("kernel ") for reason in error.reasons):
            pytest.skip("no kernel serves this here: " + " | ".join(error.reasons))
        raise


def integers(n_q: int, n_k: int, dtype: torch.dtype, d: int = 64) -> list[torch.Tensor]:
    torch.manual_seed(n_q + n_k)
    return [contract.integers(2, 4, n, d, low=-2, high=2).to(dtype) for n in (n_q, n_k, n_k)]


@pytest.mark.parametrize("grouping", ["interleaved", "consecutive"])
@pytest.mark.parametrize(
    "dtype,pattern", [(torch.bfloat16, "2:4"), (torch.float16, "2:4"), (torch.bfloat16, "1:2"), (torch.float32, "1:2")],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n_q,n_k", [(128, 256), (77, 300), (1, 129)], ids=str)
def test_agrees_with_the_cpu(
    n_q: int, n_k: int, causal: bool, dtype: torch.dtype, pattern: str, grouping: dspattn.patterns.Grouping
) -> None:
    """Whole numbers: the scores are exact, so both keep the same keys."""
    inputs = integers(n_q, n_k, dtype)
    options: dict[str, Any] = dict(
        pattern=pattern, grouping=grouping, is_causal=causal, alignment="bottom_right", return_lse=True
    )
    out, lse = served(*(t.cuda() for t in inputs), **options)
    wanted, wanted_lse = dspattn.attention(*inputs, **options)
    tolerance = {torch.float32: 5e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}[dtype]
    torch.testing.assert_close(out.cpu(), wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.cpu(), wanted_lse, atol=1e-2, rtol=1e-2)


def test_runs_on_the_current_stream() -> None:
    """The inputs are written on a side stream behind a long wait; a kernel on another stream would see zeros."""
    source = [t.cuda() for t in integers(256, 256, torch.bfloat16)]
    wanted = served(*source, pattern="2:4")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = [torch.zeros_like(t) for t in source]
        torch.cuda._sleep(50_000_000)
        for to, of in zip(late, source, strict=True):
            to.copy_(of)
        out = dspattn.attention(*late, pattern="2:4")
    stream.synchronize()
    assert torch.equal(out, wanted)


def test_cuda_graph() -> None:
    inputs = [t.cuda() for t in integers(256, 256, torch.bfloat16)]
    for _ in range(3):
        wanted = served(*inputs, pattern="2:4")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dspattn.attention(*inputs, pattern="2:4")
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)


def test_a_training_step_in_a_cuda_graph() -> None:
    """Forward, backward and the step itself, captured whole: replays go on as steps do that are not captured."""

    def start() -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
        leaves = [t.cuda().requires_grad_() for t in integers(256, 256, torch.bfloat16)]
        return leaves, torch.optim.SGD(leaves, lr=0.5)

    def step(leaves: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        served(*leaves, pattern="2:4", is_causal=True).float().square().mean().backward()
        optimizer.step()

    wanted, optimizer = start()
    for _ in range(6):
        step(wanted, optimizer)
    leaves, optimizer = start()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(leaves, optimizer)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(leaves, optimizer)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(leaves, wanted, strict=True))


def test_graphed_callables_train() -> None:
    """torch.cuda.make_graphed_callables: forward and backward as two graphs."""

    class Attend(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.bfloat16))

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return served(q * self.scale, k, v, pattern="1:2", is_causal=True)  # type: ignore[no-any-return]

    module = Attend().cuda()
    inputs = [t.cuda().requires_grad_() for t in integers(256, 256, torch.bfloat16)]
    gradient = torch.randn_like(inputs[0])
    everything = (*inputs, module.scale)
    out = module(*inputs)
    wanted = torch.autograd.grad(out, everything, gradient)
    sample = tuple(t.detach().clone().requires_grad_() for t in inputs)
    graphed = torch.cuda.make_graphed_callables(Attend().cuda(), sample)
    graphed_out = graphed(*inputs)
    found = torch.autograd.grad(graphed_out, (*inputs, graphed.scale), gradient)
    assert torch.equal(graphed_out, out)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("pattern", ["2:4", "1:2"])
def test_the_short_way_gives_the_bits_of_the_general_one(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float32 tensors under autocast, in the layout of models."""
    from dspattn import _qkv

    torch.manual_seed(0)
    leaves = [torch.randn(2, 300, h, 64, device="cuda", requires_grad=True) for h in (9, 3, 3)]
    gradient = torch.randn(2, 9, 300, 64, device="cuda", dtype=torch.bfloat16)

    def call() -> list[torch.Tensor]:
        q, k, v = (t.transpose(1, 2) for t in leaves)
        with torch.autocast("cuda", torch.bfloat16):
            out = served(q, k, v, pattern=pattern, is_causal=True, enable_gqa=True)
        return [out, *torch.autograd.grad(out, leaves, gradient)]

    ours = call()
    monkeypatch.setattr(_qkv, "attention", lambda *_: None)
    assert all(torch.equal(a, b) for a, b in zip(ours, call(), strict=True))


def test_inputs_stay_where_they_are() -> None:
    """[batch, n, heads, d] memory, as models have it, is read through its strides."""
    inputs = integers(128, 256, torch.bfloat16)
    strided = [t.transpose(1, 2).contiguous().cuda().transpose(1, 2) for t in inputs]
    assert torch.equal(served(*strided), served(*(t.cuda() for t in inputs)))


def test_packed_batch() -> None:
    lengths = [100, 1, 155]
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in integers(256, 256, torch.bfloat16))
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    try:
        out = dspattn.varlen_attention(q.cuda(), k.cuda(), v.cuda(), cu.cuda(), cu.cuda(), 155, 155, is_causal=True)
    except dspattn.DspattnError as error:
        pytest.skip("no kernel serves this here: " + " | ".join(error.reasons))
    wanted = dspattn.varlen_attention(q, k, v, cu, cu, 155, 155, is_causal=True)
    torch.testing.assert_close(out.cpu(), wanted, atol=3e-2, rtol=3e-2)


def test_autocast() -> None:
    inputs = [t.cuda() for t in integers(128, 256, torch.float32)]
    wanted = served(*(t.bfloat16() for t in inputs))
    with torch.autocast("cuda", torch.bfloat16):
        out = dspattn.attention(*inputs)
    assert out.dtype == torch.bfloat16 and torch.equal(out, wanted)


def test_every_sdpa_call_inside_use() -> None:
    inputs = [t.cuda() for t in integers(128, 256, torch.bfloat16)]
    wanted = served(*inputs, pattern="2:4")
    with dspattn.use("2:4"):
        out = torch.nn.functional.scaled_dot_product_attention(*inputs)
    assert torch.equal(out, wanted)


def test_compile_in_one_graph() -> None:
    inputs = [t.cuda() for t in integers(128, 256, torch.bfloat16)]
    wanted = served(*inputs)
    compiled = torch.compile(dspattn.attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), wanted)


def gradients_of(inputs: list[torch.Tensor], d_out: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Gradients of q, k, v and, where there is one, the bias (attn_mask) or the sinks."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    extra = {
        name: options.pop(name).detach().clone().requires_grad_() for name in ("attn_mask", "sinks") if name in options
    }
    out = served(*leaves, **extra, **options)
    return list(torch.autograd.grad(out, [*leaves, *extra.values()], d_out.to(out)))


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "pattern,options",
    [
        ("1:2", {}),
        ("2:4", {"is_causal": True, "alignment": "bottom_right"}),
        ("dense", {}),
        ("1:4", {"attn_mask": normal(1, 4, 77, 300)}),
        ("2:4", {"attn_mask": normal(1, 1, 1, 300)}),
        ("4:8", {"soft_cap": 5.0}),
        ("2:4", {"sinks": normal(4)}),
    ],
    ids=str,
)
def test_gradients_agree_with_the_cpu(dtype: torch.dtype, pattern: str, options: dict[str, Any]) -> None:
    """Whole numbers for q and k: the scores are exact, so both keep the same keys."""
    q, k, v = integers(77, 300, dtype)
    d_out = normal(*q.shape[:3], v.shape[3], dtype=dtype)
    found = []
    for device in ("cuda", "cpu"):
        moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        if "attn_mask" in moved:
            moved["attn_mask"] = moved["attn_mask"].to(dtype)
        found.append(gradients_of([t.to(device) for t in (q, k, v)], d_out.to(device), pattern=pattern, **moved))
    tolerance = {torch.float32: 1e-2, torch.bfloat16: 6e-2, torch.float16: 2e-2}[dtype]
    for ours, theirs in zip(*found, strict=True):
        scale = float(theirs.float().abs().max()) + 1
        torch.testing.assert_close(ours.cpu().float(), theirs.float(), atol=tolerance * scale, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_with_dropout_are_those_of_the_weights_that_forward_dropped(dtype: torch.dtype) -> None:
    """The output is linear in v: its gradient, applied to v, is the output again."""
    q, k, v = (t.cuda() for t in integers(128, 256, dtype))
    v.requires_grad_()
    torch.manual_seed(3)
    out = served(q, k, v, dropout_p=0.4)
    d_out = torch.randn_like(out)
    (d_v,) = torch.autograd.grad(out, v, d_out)
    assert float(((out == 0).all(-1)).float().mean()) < 0.1
    torch.testing.assert_close(
        (d_v.double() * v.double()).sum(), (d_out.double() * out.double()).sum(), atol=5.0, rtol=2e-2
    )


@pytest.mark.parametrize(
    "dtype,pattern", [(torch.bfloat16, "2:4"), (torch.float16, "1:2"), (torch.float32, "1:2")], ids=str
)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_under_block_masks_are_those_of_the_cpu(dtype: torch.dtype, pattern: str, causal: bool) -> None:
    """Whole numbers: forward on the pipeline and backward on the general kernel keep the same keys."""
    mask = dspattn.block_masks.bigbird(256, 384, window=1, random=1)
    found = []
    for device in ("cuda", "cpu"):
        q, k, v = (t.to(device).requires_grad_() for t in integers(256, 384, dtype))
        out = dspattn.block_attention(q, k, v, mask.to(device), pattern=pattern, is_causal=causal)
        d_out = contract.integers(*out.shape, low=-2, high=2).to(device, dtype)
        found.append([out, *torch.autograd.grad(out, [q, k, v], d_out)])
    for ours, wanted in zip(*found, strict=True):
        scale = float(wanted.float().abs().max())
        error = float((ours.cpu().float() - wanted.float()).abs().max())
        assert error <= {torch.float32: 5e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}[dtype] * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*dspattn.zoo.names(), *(f"{name} + N:M" for name in COMBINED)])
def test_every_mechanism_trains(name: str, dtype: torch.dtype) -> None:
    pattern = {"pattern": "1:2" if dtype == torch.float32 else "2:4"} if name.endswith(" + N:M") else {}
    torch.manual_seed(0)
    attend = dspattn.zoo.create(name.removesuffix(" + N:M"), heads=2, head_dim=32, n=512, **pattern)
    attend = attend.to("cuda", dtype).train()
    q, k, v = (torch.randn(2, 2, 512, 32, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    attend(q, k, v).float().square().sum().backward()
    for tensor, letter in ((q, "q"), (k, "k"), (v, "v")):
        if letter not in " ".join(attend.unused):
            assert tensor.grad is not None and bool(tensor.grad.isfinite().all()) and bool(tensor.grad.any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("pairs", dspattn.preparing.PAIRS)
def test_norm_rope_rounds_as_pytorchs_own_operators(pairs: Any, dtype: torch.dtype) -> None:
    """In a CUDA graph, on what a product for q, k and v leaves; a norm's last bit may differ."""
    torch.manual_seed(0)
    together = [torch.randn(2, n, 5, 3 * 128, device="cuda").to(dtype) for n in (33, 70)]
    queries, keys, _ = zip(*(part.chunk(3, -1) for part in together), strict=True)
    weights = [torch.rand(128, device="cuda").to(dtype) for _ in range(2)]
    angles = torch.rand(103, 128, device="cuda") * 6
    options: Any = (1e-6, angles.cos(), angles.sin(), pairs)

    def prepared() -> tuple[torch.Tensor, torch.Tensor]:
        named = dict(zip(("eps", "cos", "sin", "pairs"), options, strict=True))
        return dspattn.norm_rope(queries, keys, query_weight=weights, key_weight=weights, **named)

    prepared()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = prepared()
    for part in together:
        part.normal_()
    graph.replay()
    for found, parts in zip(results, (queries, keys), strict=True):
        stock = dspattn.preparing.plain(parts, weights, *options)
        assert dtype == torch.float32 or (found != stock).float().mean() < 1e-3
        close = 3e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(found, stock, atol=close, rtol=close)


def test_tensors_on_different_devices_raise() -> None:
    q, k, v = integers(128, 128, torch.bfloat16)
    with pytest.raises(dspattn.DspattnError, match="key: expected a tensor on cuda:0"):
        dspattn.attention(q.cuda(), k, v.cuda())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current() -> None:
    inputs = integers(128, 256, torch.bfloat16)
    first = served(*(t.to("cuda:0") for t in inputs))
    second = served(*(t.to("cuda:1") for t in inputs))
    assert second.device.index == 1 and torch.cuda.current_device() == 0
    assert torch.equal(first.cpu(), second.cpu())
