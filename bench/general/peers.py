"""PyTorch's backward kernels, called as its autograd calls them: each function runs the forward once and returns a call
of the backward alone."""

import torch

ATEN = torch.ops.aten


def flash2(q, k, v, d_out, causal):
    found = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = found
    return lambda: ATEN._scaled_dot_product_flash_attention_backward(
        d_out, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, 0.0, causal, seed, offset
    )


def efficient(q, k, v, d_out, causal):
    out, lse, seed, offset = ATEN._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return lambda: ATEN._scaled_dot_product_efficient_attention_backward(
        d_out, q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False], causal
    )


def math(q, k, v, d_out, causal):
    """Unfused: the weights are kept from the forward."""
    scale = q.shape[-1] ** -0.5
    scores = scale * (q @ k.mT)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], device=q.device).triu(1) > 0, float("-inf"))
    weights = scores.softmax(-1)

    def backward():
        d_v = weights.mT @ d_out
        d_scores = torch._softmax_backward_data(d_out @ v.mT, weights, -1, weights.dtype)
        return (d_scores @ k) * scale, (d_scores.mT @ q) * scale, d_v

    return backward


BACKWARD = {"flash2": flash2, "efficient": efficient, "math": math}
