"""dspattn.merge, and what makes parts mergeable: the offset of their masks and results in float32."""

import pytest
import torch

import dspattn


def parts_of(q, k, v, cut, **options):
    pieces = [slice(start, min(start + cut, k.shape[-2])) for start in range(0, k.shape[-2], cut)]
    results = [
        dspattn.attention(
            q, k[..., s, :], v[..., s, :], offset=-s.start, return_lse=True, out_dtype=torch.float32, **options
        )
        for s in pieces
    ]
    return list(zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, (140, 3)])
def test_parts_merge_to_the_whole_with_its_gradients(dtype, window):
    torch.manual_seed(0)
    q, k, v = (torch.randint(-2, 3, (2, 2, 300, 16)).to(dtype).requires_grad_() for _ in range(3))
    options = {"is_causal": True, "window": window, "scale": 0.25}
    out, lse = dspattn.merge(*parts_of(q, k, v, 128, **options))
    whole, whole_lse = dspattn.attention(q, k, v, return_lse=True, out_dtype=torch.float32, **options)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, whole_lse, atol=1e-5, rtol=1e-5)
    d_out = torch.randn_like(out)
    ours = torch.autograd.grad(out, (q, k, v), d_out)
    wanted = torch.autograd.grad(whole, (q, k, v), d_out)
    for grad, expected in zip(ours, wanted, strict=True):
        assert grad.dtype == dtype
        scale = expected.float().abs().max()
        torch.testing.assert_close(
            grad.float() / scale, expected.float() / scale, atol=1e-5 if dtype == torch.float32 else 8e-3, rtol=0
        )


def test_rows_without_a_key_in_any_part():
    out, lse = dspattn.merge([torch.ones(2, 3), torch.ones(2, 3)], [torch.tensor([-torch.inf, 0.0])] * 2)
    assert torch.equal(out, torch.tensor([[0.0] * 3, [1.0] * 3])) and lse[0] == -torch.inf


def test_errors_name_the_part():
    good, lse = torch.ones(2, 3), torch.zeros(2)
    with pytest.raises(
        dspattn.DspattnError, match=r"outs\[1\]: expected outs\[0\]'s \[2, 3\] of float32, got \[2, 4\]"
    ):
        dspattn.merge([good, torch.ones(2, 4)], [lse, lse])
    with pytest.raises(dspattn.DspattnError, match=r"lses\[0\]: expected \[2\] of float32, got \[3\]"):
        dspattn.merge([good], [torch.zeros(3)])
    with pytest.raises(dspattn.DspattnError, match="got 1 and 0"):
        dspattn.merge([good], [])
    q = torch.ones(1, 1, 2, 4)
    with pytest.raises(dspattn.DspattnError, match="out_dtype: expected float32, got float16"):
        dspattn.attention(q, q, q, out_dtype=torch.float16)
    with pytest.raises(dspattn.DspattnError, match="offset: expected from"):
        dspattn.attention(q, q, q, is_causal=True, offset=1 << 40)


def test_what_is_no_result_of_attention_is_refused() -> None:
    out, lse = torch.randn(2, 3), torch.randn(2)
    for given, reason in (
        ((None, None), "outs: expected a sequence of tensors, got NoneType"),
        (("ab", "cd"), "outs: expected a sequence of tensors, got str"),
        (([1.0], [lse]), r"outs\[0\]: expected a tensor, got float"),
        (([out.int()], [lse]), r"outs\[0\]: expected .* of float32, float16 or bfloat16, got \[2, 3\] of int32"),
        (([out.double()], [lse]), "float64"),
        (([out, out.to("meta")], [lse, lse]), r"outs\[1\]: expected a tensor on cpu as outs\[0\] is, got one on meta"),
        (([out], [lse.to("meta")]), r"lses\[0\]: expected a tensor on cpu"),
    ):
        with pytest.raises(dspattn.DspattnError, match=reason):
            dspattn.merge(*given)
    stacked = dspattn.merge(torch.stack([out, out]), torch.stack([lse, lse]))
    torch.testing.assert_close(stacked[0], out)
