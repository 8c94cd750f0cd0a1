"""Masks and tensors that are subclasses of torch.Tensor: PyTorch's causal biases are served, unknown ones refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as sdpa

import dspattn

N_K = 9
OPTIONS = {"pattern": "1:2", "grouping": "consecutive"}


def tensors(n_q: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 2, n_q, 8), torch.randn(2, 2, N_K, 8), torch.randn(2, 2, N_K, 8)


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("n_q", [1, 5, 9, 12])
@pytest.mark.parametrize("make,alignment", [(causal_lower_right, "bottom_right"), (causal_upper_left, "top_left")])
def test_causal_biases_mean_an_alignment(make: Callable[..., CausalBias], alignment: str, n_q: int) -> None:
    q, k, v = tensors(n_q)
    bias = make(n_q, N_K)
    written_out = bias._materialize()
    wanted = dspattn.attention(q, k, v, written_out, **OPTIONS)
    assert torch.equal(dspattn.attention(q, k, v, is_causal=True, alignment=alignment, **OPTIONS), wanted)
    assert torch.equal(dspattn.attention(q, k, v, bias, **OPTIONS), wanted)
    assert torch.equal(dspattn.attention(q, k, v, attn_bias=bias, **OPTIONS), wanted)
    assert torch.equal(dspattn.attention(q[0, 0], k[0, 0], v[0, 0], bias, **OPTIONS), wanted[0, 0])
    weights = dspattn.attention_weights(q, k, bias, **OPTIONS)
    assert torch.equal(weights, dspattn.attention_weights(q, k, written_out, **OPTIONS))
    with dspattn.use(**OPTIONS):
        assert torch.equal(sdpa(q, k, v, bias), wanted)
        assert torch.equal(sdpa(q, k, v, attn_mask=bias), wanted)
    for ours, theirs in zip(dspattn.sddmm(q, k, bias), dspattn.sddmm(q, k, written_out), strict=True):
        assert torch.equal(ours, theirs)


def test_causal_bias_beside_other_masks() -> None:
    q, k, v = tensors(5)
    bias, mask = causal_lower_right(5, N_K), torch.rand(5, N_K) > 0.3
    assert torch.equal(
        dspattn.attention(q, k, v, mask, attn_bias=bias, window=(3, None), alignment="bottom_right", **OPTIONS),
        dspattn.attention(q, k, v, mask, is_causal=True, window=(3, None), alignment="bottom_right", **OPTIONS),
    )
    for reason, wrong in {
        "attn_mask: expected a causal bias for 5 queries and 9 keys, got one for 4 x 9": {
            "attn_mask": causal_lower_right(4, N_K)
        },
        "is_causal: expected False beside the causal bias in attn_mask, got True": {
            "attn_mask": bias, "is_causal": True
        },
        'alignment: expected "bottom_right", as attn_mask has, for the window, got "top_left"': {
            "attn_mask": bias, "window": 3
        },
    }.items():  # fmt: skip
        with pytest.raises(dspattn.DspattnError) as caught:
            dspattn.attention(q, k, v, **wrong)
        assert str(caught.value) == reason


class Unknown(Tensor):
    """What it means may not lie in its memory."""


@pytest.mark.filterwarnings("ignore:.*MaskedTensors is in prototype stage")
def test_unknown_subclasses_are_refused() -> None:
    q, k, v = tensors(N_K)
    packed, cu = q[0].transpose(0, 1), torch.tensor([0, N_K])
    module = dspattn.nn.MultiheadAttention(16, 2)
    x = torch.randn(N_K, 2, 16)
    nonzeros, metadata = dspattn.sddmm(q, k)

    def other(tensor: Tensor) -> Unknown:
        return tensor.as_subclass(Unknown)

    mask = other(torch.ones(N_K, N_K))
    masked = torch.masked.masked_tensor(torch.zeros(N_K, N_K), torch.ones(N_K, N_K, dtype=torch.bool))
    calls: dict[str, Callable[[], object]] = {
        "query": lambda: dspattn.attention(other(q), k, v),
        "key": lambda: dspattn.attention(q, other(k), v),
        "value": lambda: dspattn.attention(q, k, other(v)),
        "attn_mask": lambda: dspattn.attention(q, k, v, mask),
        "attn_bias": lambda: dspattn.attention(q, k, v, attn_bias=mask),
        "key_lengths": lambda: dspattn.attention(q, k, v, key_lengths=other(torch.tensor([3, 4]))),
        "cu_seqlens_q": lambda: dspattn.varlen_attention(packed, packed, packed, other(cu), cu),
        "query of packed": lambda: dspattn.varlen_attention(other(packed), packed, packed, cu, cu),
        "attn_mask of packed": lambda: dspattn.varlen_attention(
            packed, packed, packed, cu, cu, attn_mask=causal_lower_right(N_K, N_K)
        ),
        "attn_mask of a class with operators of its own": lambda: dspattn.attention(q, k, v, attn_mask=masked),
        "attn_mask of module": lambda: module(x, x, x, attn_mask=causal_lower_right(N_K, N_K)),
        "query of sddmm": lambda: dspattn.sddmm(other(q), k),
        "nonzeros": lambda: dspattn.spmm(other(nonzeros), metadata, v),
        "value of spmm": lambda: dspattn.spmm(nonzeros, metadata, other(v)),
    }
    for name, call in calls.items():
        with pytest.raises(
            dspattn.DspattnError, match=rf"^{name.split()[0]}: expected a plain tensor, got the subclass"
        ):
            call()
    wanted = dspattn.attention(q, k, v)
    assert torch.equal(dspattn.attention(other(q).as_subclass(Tensor), k, v), wanted)
    assert torch.equal(dspattn.attention(torch.nn.Parameter(q), torch.nn.Buffer(k), v), wanted)
