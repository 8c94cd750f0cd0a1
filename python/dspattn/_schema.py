"""The arguments of ``torch.ops.dspattn.attention``: the one list of them in Python.

Everything packs and unpacks them by name; the order is that of the operator as C++ registers it (``ProblemArguments``
in bindings/torch/attention_ops.cpp), and ``tests/python/test_schema.py`` holds the two together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class ProblemArguments(NamedTuple):
    """One attention problem as the operator takes it: ``attention(*problem)``.

    ``attention_backward`` takes the gradient and the results of forward before it.
    """

    q: Tensor  # [batch, heads, n_q, d]
    k: Tensor  # [batch, kv_heads, n_k, d]
    v: Tensor  # [batch, kv_heads, n_k, d_v]
    allowed: Tensor | None = None  # bool, [batch or 1, heads or 1, n_q or 1, n_k or 1]
    bias: Tensor | None = None  # the same shapes, added to the scaled scores
    key_lengths: Tensor | None = None  # int32 [batch]
    cu_q: Tensor | None = None  # int32 [sequences + 1]; packed batches have both, with batch = 1 above
    cu_k: Tensor | None = None
    sinks: Tensor | None = None  # fp32 [heads], logits without values
    block_table: Tensor | None = None  # int32 [batch, blocks]; k and v are then pages
    dropout_state: Tensor | None = None  # int32 [4], what the random numbers of dropout are made of
    value_sums: Tensor | None = None  # fp32 [batch, kv_heads, 2 * blocks, d_v + 1]
    max_q: int = 0  # longest sequences of a packed batch
    max_k: int = 0
    keep: int = 1
    group: int = 1
    interleaved: bool = True
    causal: bool = False
    top_left: bool = True
    window_left: int | None = None
    window_right: int | None = None
    scale: float | None = None
    full_fp32: bool = False
    kernel: str = ""
    offset: int = 0  # of the diagonal, for pieces of longer sequences
    fp32_results: bool = False  # whatever the type of q
    rest_mean: bool = False  # the pruned keys' weight goes to the mean of v
    shared_choice: bool = False  # the heads that share keys keep the same ones
    dropout: float = 0.0
    soft_cap: float | None = None

    def tensors(self) -> dict[str, Tensor | None]:
        """The tensors by name."""
        fields: dict[str, Any] = self._asdict()
        return {name: fields[name] for name in self._fields[:TENSORS]}

    def factor(self) -> float:
        """What the scores are multiplied with."""
        if self.scale is not None:
            return self.scale
        d = self.q.shape[3]
        return float(d**-0.5) if d > 0 else 1.0  # without elements every score is 0, whatever the factor


TENSORS = 12  # q to value_sums come first
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")  # of those, as attention_backward gives their gradients


class BackwardArguments(NamedTuple):
    """What ``attention_backward`` takes before the problem; the tensors are all [batch, heads, n_q, ...].

    It gives the gradients of q, k, v, the bias and the sinks; those of the last two are empty unless wanted.
    """

    d_out: Tensor
    out: Tensor
    lse: Tensor
    d_lse: Tensor | None
    wants_d_bias: bool
    wants_d_sinks: bool
