"""The registered operators as PyTorch sees them: opcheck, torch.compile, autocast, inference mode, torch.func."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import dspattn
from dspattn import _ops, _qkv
from dspattn._schema import ProblemArguments


def problem(tensors: Sequence[torch.Tensor], **changes: Any) -> ProblemArguments:
    return ProblemArguments(*tensors, **({"keep": 2, "group": 4} | changes))


def tensors(requires_grad: bool = False, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 140, 16), torch.randn(2, 2, 140, 8)
    return [t.to(dtype).requires_grad_(requires_grad) for t in (q, k, v)]


CU_Q, CU_K = (torch.tensor(c, dtype=torch.int32) for c in ([0, 4, 9], [0, 100, 140]))
PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal window": {"causal": True, "top_left": False, "window_left": 50, "interleaved": False},
    "masks": {
        "allowed": torch.rand(2, 1, 9, 140) > 0.5,
        "bias": torch.randn(1, 4, 1, 140),
        "key_lengths": torch.tensor([140, 7]).int(),
        "keep": 1,
        "group": 2,
        "scale": 0.3,
    },
    "training": {
        "bias": torch.randn(2, 1, 9, 140),
        "sinks": torch.randn(4),
        "dropout_state": torch.arange(4).int(),
        "dropout": 0.2,
        "soft_cap": 5.0,
        "keep": 2,
        "group": 4,
    },
}


def packed(requires_grad: bool) -> ProblemArguments:
    one = [t[:1].detach().requires_grad_(requires_grad) for t in tensors()]
    return problem(one, cu_q=CU_Q, cu_k=CU_K, max_q=5, max_k=100)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", [*PROBLEMS, "packed"])
def test_opcheck_attention(name: str, requires_grad: bool) -> None:
    given = packed(requires_grad) if name == "packed" else problem(tensors(requires_grad), **PROBLEMS[name])
    torch.library.opcheck(_ops.attention, tuple(given))


@pytest.mark.parametrize("name", PROBLEMS)
def test_opcheck_attention_backward(name: str) -> None:
    given = problem(tensors(), **PROBLEMS[name])
    out, lse = _ops.attention(*given)
    wanted = (given.bias is not None, given.sinks is not None)
    d_lse = torch.randn_like(lse) if wanted[0] else None
    torch.library.opcheck(_ops.attention_backward, (torch.randn_like(out), out, lse, d_lse, *wanted, *given))


def test_opcheck_of_q_k_and_v_alone() -> None:
    q, k, v = tensors()
    code = _qkv.code_of("2:4", "consecutive", "drop", "own", "bottom_right", True, True, (50, 3))
    assert code is not None
    torch.library.opcheck(_ops.attention_qkv, (q, k, v, code.number, 0.3))
    out, lse = _ops.attention_qkv(q, k, v, code.number, 0.3)
    torch.library.opcheck(_ops.attention_qkv_backward, (torch.randn_like(out), out, lse, q, k, v, code.number, 0.3))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("wide,keep,group", [(True, 1, 2), (False, 2, 4), (False, 1, 2)])
def test_opcheck_codec(wide: bool, keep: int, group: int, interleaved: bool) -> None:
    scores = torch.randn(3, 37, 150)
    pattern = (keep, group, interleaved)
    torch.library.opcheck(_ops.nm_prune, (scores, *pattern))
    indices = _ops.nm_prune(scores, *pattern)
    torch.library.opcheck(_ops.nm_encode, (indices, 150, *pattern, wide))
    metadata = _ops.nm_encode(indices, 150, *pattern, wide)
    torch.library.opcheck(_ops.nm_decode, (metadata, 37, 150, *pattern, wide))
    assert torch.equal(_ops.nm_decode(metadata, 37, 150, *pattern, wide), indices)


@pytest.mark.parametrize("dtype,keep,group", [(torch.float32, 1, 2), (torch.bfloat16, 2, 4)], ids=str)
def test_opcheck_three_steps(dtype: torch.dtype, keep: int, group: int) -> None:
    q, k, v = (torch.randn(2, 3, n, 16).to(dtype) for n in (37, 150, 150))
    pattern = (keep, group, False)
    options = (*pattern, True, False, 0.25)  # causal, not top-left, scale
    torch.library.opcheck(_ops.sparse_scores, (q, k, None, None, *options))
    nonzeros, metadata = _ops.sparse_scores(q, k, None, None, *options)
    torch.library.opcheck(_ops.sparse_softmax_, (nonzeros.clone(),))
    _ops.sparse_softmax_(nonzeros)
    torch.library.opcheck(_ops.sparse_product, (nonzeros, metadata, v, 37, *pattern))


def test_opcheck_update_value_sums() -> None:
    sums, value = torch.zeros(1, 2, 4, 9), torch.randn(1, 2, 256, 8)
    torch.library.opcheck(_ops.update_value_sums, (sums, value, 256, torch.tensor([200], dtype=torch.int32)))


def test_every_registered_operator_is_checked() -> None:
    registered = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("dspattn::")}
    codec = {"nm_prune", "nm_encode", "nm_decode"}
    three_steps = {"sparse_scores", "sparse_softmax_", "sparse_product"}
    blocks = {"block_mask", "block_attention"}  # checked in test_block_masks.py
    cached = {"update_value_sums"}
    preparing = {"norm_rope"}  # checked in test_norm_rope.py
    brief = {"_attention_qkv", "_attention_qkv_backward"}
    whole = {"attention", "attention_backward"}
    assert registered == whole | brief | codec | three_steps | blocks | cached | preparing


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic: bool) -> None:
    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out, lse = dspattn.attention(q * 2, k, v, mask, enable_gqa=True, return_lse=True, window=(None, 100))
        return out.transpose(1, 2).flatten(2).sin() * lse.sum()

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n_q, n_k in ((9, 140), (11, 133)) if dynamic else ((9, 140),):
        q, k, v = torch.randn(2, 4, n_q, 16), torch.randn(2, 2, n_k, 16), torch.randn(2, 2, n_k, 8)
        mask = torch.rand(2, 1, n_q, n_k) > 0.3
        results = []
        for run in (model, compiled):
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            out = run(*leaves, mask)
            results.append((out, *torch.autograd.grad(out.cos().sum(), leaves)))
        for eager, graph in zip(*results, strict=True):
            torch.testing.assert_close(eager, graph)


@pytest.mark.long
def test_compile_with_inductor() -> None:
    """The real backend once: it writes and compiles C++ around the operator."""
    compiled = torch.compile(lambda q, k, v: dspattn.attention(q.sin(), k, v, enable_gqa=True) + 1, fullgraph=True)
    q, k, v = tensors()
    with torch.no_grad():
        torch.testing.assert_close(compiled(q, k, v), dspattn.attention(q.sin(), k, v, enable_gqa=True) + 1)


def test_export() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return dspattn.attention(q, k, v, enable_gqa=True, is_causal=True)

    program = torch.export.export(Module(), tuple(tensors()))
    torch.testing.assert_close(program.module()(*tensors()), Module()(*tensors()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_as_sdpa(dtype: torch.dtype) -> None:
    leaves = tensors(requires_grad=True)
    bias = torch.randn(1, 1, 9, 140)
    with torch.autocast("cpu", dtype=dtype):
        ours = dspattn.attention(*leaves, bias, enable_gqa=True, pattern="dense")
        theirs = sdpa(*leaves, bias, enable_gqa=True)
    assert ours.dtype == theirs.dtype == dtype
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
    gradients = torch.autograd.grad(ours.float().sum(), leaves)
    assert all(g.dtype == torch.float32 for g in gradients)


def test_inference_mode_and_no_grad() -> None:
    for context in (torch.inference_mode, torch.no_grad):
        leaves = tensors(requires_grad=True)
        with context():
            out = dspattn.attention(*leaves, enable_gqa=True)
        assert not out.requires_grad
        torch.testing.assert_close(out, dspattn.attention(*tensors(), enable_gqa=True))
    with torch.inference_mode():
        made_inside = tensors()
        assert dspattn.attention(*made_inside, enable_gqa=True).is_inference()


def test_only_wanted_gradients() -> None:
    q, k, v = tensors()
    for wanted in range(3):
        leaves = [t.clone().requires_grad_(i == wanted) for i, t in enumerate((q, k, v))]
        dspattn.attention(*leaves, enable_gqa=True).sum().backward()
        assert [t.grad is not None for t in leaves] == [i == wanted for i in range(3)]


@pytest.mark.parametrize("registered", [False, True])
def test_double_backward_raises(registered: bool) -> None:
    leaves = tensors(requires_grad=True)
    run = (lambda: _ops.attention(*problem(leaves))[0]) if registered else (
        lambda: dspattn.attention(*leaves, enable_gqa=True))  # fmt: skip
    (first,) = torch.autograd.grad(run().sum(), leaves[:1], create_graph=True)
    with pytest.raises(dspattn.DspattnError, match="double backward"):
        torch.autograd.grad(first.sum(), leaves[:1])


def test_torch_func_grad() -> None:
    leaves = tensors()
    through_func = torch.func.grad(lambda *x: dspattn.attention(*x, enable_gqa=True).sin().sum(), argnums=(0, 1, 2))(
        *leaves
    )
    again = [t.clone().requires_grad_() for t in leaves]
    plain = torch.autograd.grad(dspattn.attention(*again, enable_gqa=True).sin().sum(), again)
    for a, b in zip(through_func, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_same_bits_for_any_number_of_threads() -> None:
    leaves = tensors(requires_grad=True)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            out = dspattn.attention(*leaves, enable_gqa=True)
            results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
        finally:
            torch.set_num_threads(1)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_meta_tensors() -> None:
    out, lse = dspattn.attention(*(t.to("meta") for t in tensors()), enable_gqa=True, return_lse=True)
    assert out.shape == (2, 4, 9, 8) and lse.shape == (2, 4, 9) and out.device.type == "meta"
