"""Look inside a model's attention: what each layer was given, which keys each query kept, and what that changed.

``capture`` runs a transformers model once and keeps the queries, keys and values of every layer; ``compare`` runs the
library on them, dense and pruned, and measures the difference. What was kept is read off the weights the kernel itself
used (see :func:`dspattn.attention_weights`); nothing here repeats the selection.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .functional import attention
from .patterns import Grouping
from .weights import attention_weights

CAPTURE_NAME = "dspattn_capture"


@dataclass(frozen=True)
class LayerInputs:
    """What one attention layer computed with, for one text."""

    query: Tensor  # [1, heads, n_q, d]
    key: Tensor  # [1, kv_heads, n_k, d]
    value: Tensor  # [1, kv_heads, n_k, d_v]
    mask: Tensor | None  # broadcasts to [1, heads, n_q, n_k]; None: everything is seen
    scale: float
    bias: Tensor | None = None  # by relative position, [1 or batch, heads, n_q, n_k]
    soft_cap: float | None = None
    sinks: Tensor | None = None  # [heads]

    @property
    def heads(self) -> int:
        return int(self.query.shape[1])

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of :func:`dspattn.attention` that this layer's call had."""
        return {
            "attn_mask": self.mask, "attn_bias": self.bias, "scale": self.scale, "enable_gqa": True,
            "soft_cap": self.soft_cap, "sinks": self.sinks,
        }  # fmt: skip

    def output(self, pattern: str, grouping: Grouping) -> Tensor:
        """The layer's output with that pattern, [1, heads, n_q, d_v]."""
        return attention(self.query, self.key, self.value, pattern=pattern, grouping=grouping, **self.arguments())

    def weights(self, pattern: str, grouping: Grouping) -> Tensor:
        """The weights with that pattern, [1, heads, n_q, n_k]; zero where pruned or masked."""
        return attention_weights(self.query, self.key, pattern=pattern, grouping=grouping, **self.arguments())


@dataclass(frozen=True)
class LayerComparison:
    """One layer, pruned against dense."""

    kept: Tensor  # bool [heads, n_q, n_k]: got a weight above zero
    kept_weight: Tensor  # [heads, n_q]: share of the dense weight that lies on kept keys
    output_error: Tensor  # [heads]: |pruned - dense| / |dense| of the layer's output, Frobenius norms


@contextmanager
def _attention_of(model: Any, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def capture(model: Any, input_ids: Tensor) -> list[LayerInputs]:
    """The inputs of every attention layer of a transformers model for one text, with dense attention.

    Args:
        model: a transformers model whose attention can be set by name; its present attention is put back afterwards.
        input_ids: token ids ``[tokens]``.

    Returns:
        One entry for each attention call, in order.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=2))
        >>> [layer.query.shape for layer in capture(model, torch.arange(9))]
        [torch.Size([1, 2, 9, 12]), torch.Size([1, 2, 9, 12])]
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    from .integrations.huggingface import raise_unknown

    layers: list[LayerInputs] = []

    def forward(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,  # the mask says it, and the window
        sliding_window: int | None = None,
        position_bias: Tensor | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        raise_unknown(others)
        scale = scaling or query.shape[-1] ** -0.5
        sinks = None if s_aux is None else s_aux.detach()
        layers.append(LayerInputs(query, key, value, attention_mask, scale, position_bias, softcap, sinks))
        if softcap is not None or sinks is not None:  # PyTorch's own attention has neither
            return layers[-1].output("dense", "interleaved").transpose(1, 2).contiguous(), None
        mask = attention_mask
        if position_bias is not None:
            mask = position_bias if mask is None else position_bias.masked_fill(~mask, float("-inf"))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    def full_mask(*arguments: Any, **options: Any) -> Any:
        return sdpa_mask(*arguments, **{**options, "allow_is_causal_skip": False})

    AttentionInterface.register(CAPTURE_NAME, forward)
    AttentionMaskInterface.register(CAPTURE_NAME, full_mask)
    with _attention_of(model, CAPTURE_NAME), torch.inference_mode():
        model(input_ids.unsqueeze(0))
    if not layers:
        raise ValueError(f"model: expected one that looks its attention up by name, {type(model).__name__} did not")
    return layers


def kept_weight(layer: LayerInputs, pattern: str, grouping: Grouping = "interleaved") -> Tensor:
    """The share of each row's dense weight that lies on the keys ``pattern`` keeps, [heads, n_q], between 0 and 1.

    Both sums of exponentials come out of the attention itself as LSE, so this costs two passes and no map.

    Example:
        >>> layer = LayerInputs(*torch.randn(3, 1, 2, 100, 16), mask=None, scale=0.25)
        >>> shares = kept_weight(layer, "2:4")
        >>> shares.shape, bool((shares > 0.5).all())
        (torch.Size([2, 100]), True)
    """
    with torch.inference_mode():
        sums = [
            attention(
                layer.query,
                layer.key,
                layer.value,
                pattern=name,
                grouping=grouping,
                return_lse=True,
                **{**layer.arguments(), "sinks": None},  # which are no keys
            )[1][0]
            for name in (pattern, "dense")
        ]
        share = (sums[0] - sums[1]).exp().clamp(max=1.0)
        return torch.where(sums[1].isneginf(), torch.ones_like(share), share)  # a row that sees nothing loses nothing


def compare(layer: LayerInputs, pattern: str, grouping: Grouping = "interleaved") -> LayerComparison:
    """What ``pattern`` keeps of a layer's attention and how far its output moves.

    Example:
        >>> layer = LayerInputs(*torch.randn(3, 1, 2, 100, 16), mask=None, scale=0.25)
        >>> compare(layer, "2:4").kept.sum(-1).unique().tolist()  # 32 groups: four keys each in 4, three in 28
        [64]
    """
    with torch.inference_mode():
        kept = layer.weights(pattern, grouping)[0] > 0
        exact = layer.output("dense", grouping)[0]
        moved = layer.output(pattern, grouping)[0] - exact
        error = moved.flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1).clamp_min(1e-30)
    return LayerComparison(kept, kept_weight(layer, pattern, grouping), error)
