"""Modules: ``MultiheadAttention`` with the parameters of PyTorch's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._flags import as_flags
from ._inputs import require_known
from ._not_offered import not_scriptable
from .errors import DspattnError
from .functional import attention
from .patterns import Grouping, Rest, Selection, parse_grouping, parse_pattern, parse_rest, parse_selection
from .weights import attention_weights


@not_scriptable
class MultiheadAttention(torch.nn.MultiheadAttention):
    """:class:`torch.nn.MultiheadAttention` whose attention is pruned; a state dict of either loads into the other.

    Args:
        embed_dim, num_heads, ...: as :class:`torch.nn.MultiheadAttention`.
        pattern: ``"2:4"``, ``"1:2"``, any ``"N:M"``, or ``"dense"``.
        grouping: ``"interleaved"`` or ``"consecutive"``.
        rest: ``"drop"`` or ``"mean"``, as in :func:`dspattn.attention`. With ``"mean"``, an ``attn_mask`` must be the
            causal one and ``is_causal`` say so.
        selection: ``"own"`` or ``"shared"``, likewise.

    Example:
        >>> plain = torch.nn.MultiheadAttention(64, 4, batch_first=True)
        >>> pruned = MultiheadAttention(64, 4, batch_first=True, pattern="2:4")
        >>> pruned.load_state_dict(plain.state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(2, 10, 64)
        >>> out, weights = pruned(x, x, x, need_weights=False)
        >>> out.shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        pattern: str = "2:4",
        grouping: Grouping = "interleaved",
        rest: Rest = "drop",
        selection: Selection = "own",
    ) -> None:
        # Written out, for what asks a module's signature, as torch.nn.utils.skip_init does.
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        parse_pattern(pattern)
        parse_grouping(grouping)
        parse_rest(rest)
        parse_selection(selection)
        self.pattern = pattern
        self.grouping: Grouping = grouping
        self.rest: Rest = rest
        self.selection: Selection = selection

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """PyTorch's encoder layers run in one fused call, past this class, where this is True. It is what PyTorch set
        while the module is being made, and False from then on; ``in_proj_weight`` tells what it would have told."""
        return "pattern" not in vars(self) and vars(self)["_qkv_same_embed_dim"]

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, value: bool) -> None:
        vars(self)["_qkv_same_embed_dim"] = value

    def extra_repr(self) -> str:
        return f"pattern={self.pattern!r}, grouping={self.grouping!r}, rest={self.rest!r}, selection={self.selection!r}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`torch.nn.MultiheadAttention.forward`.

        Args:
            query: ``[n_q, batch, embed_dim]``, with ``batch_first`` ``[batch, n_q, embed_dim]``, or without a batch.
            key: ``[n_k, batch, kdim]`` likewise.
            value: ``[n_k, batch, vdim]`` likewise.
            key_padding_mask: ``[batch, n_k]``; True (or -inf) hides the key.
            need_weights: also return the weights. They are recovered from the attention itself, 256 keys at a time, so
                leave this off where speed matters.
            attn_mask: ``[n_q, n_k]`` or ``[batch * num_heads, n_q, n_k]``; True hides a key; floating masks are added.
            average_attn_weights: average the weights over the heads.
            is_causal: a hint that ``attn_mask`` is the causal mask, as in PyTorch; ``attn_mask`` must be given.

        Returns:
            The output in the query's layout, and the weights ``[batch, n_q, n_k]`` (per head:
            ``[batch, num_heads, n_q, n_k]``) or None.
        """
        need_weights, average_attn_weights, is_causal = as_flags(
            need_weights=need_weights, average_attn_weights=average_attn_weights, is_causal=is_causal
        )
        if is_causal and attn_mask is None:
            raise DspattnError(["attn_mask: expected the causal mask that is_causal=True hints at, got None"])
        if query.is_nested:
            given = (query, key, value, key_padding_mask, attn_mask)
            return self._forward_of_nested(*given, need_weights=need_weights, average_attn_weights=average_attn_weights)
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            shapes = ", ".join(str(list(t.shape)) for t in (query, key, value))
            raise DspattnError(
                [f"query, key, value: expected 3 dimensions of each, or 2 without a batch, got {shapes}"]
            )
        batched = query.dim() == 3
        if not batched:
            query, key, value = (t.unsqueeze(0 if self.batch_first else 1) for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        if not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = (self._heads(t) for t in self._project(query, key, value))

        batch, heads, n_q = q.shape[:3]
        extra_keys = 0
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat((t, bias.view(1, 1, heads, self.head_dim).transpose(1, 2).expand(batch, -1, -1, -1)), 2)
                for t, bias in ((k, self.bias_k), (v, self.bias_v))
            )
            extra_keys += 1
        if self.add_zero_attn:
            k, v = (torch.nn.functional.pad(t, (0, 0, 0, 1)) for t in (k, v))
            extra_keys += 1
        # The mean takes no mask of many rows. The hint is believed, as PyTorch does; keys put behind see no diagonal.
        by_hint = is_causal and self.rest == "mean" and extra_keys == 0
        mask, bias = _merged_mask(None if by_hint else attn_mask, key_padding_mask, batch, heads, extra_keys, q.dtype)
        options: dict[str, Any] = {
            "attn_bias": bias, "is_causal": by_hint, "pattern": self.pattern, "grouping": self.grouping,
            "rest": self.rest, "selection": self.selection, "dropout_p": self.dropout if self.training else 0.0,
        }  # fmt: skip
        weights = attention_weights(q, k, mask, **options) if need_weights else None
        # What dropout leaves of the weights that are returned, the output is made of.
        dropped = weights if options["dropout_p"] > 0 else None
        out = attention(q, k, v, mask, **options) if dropped is None else dropped @ v
        out = out.transpose(1, 2).reshape(batch, n_q, self.embed_dim)
        out = torch.nn.functional.linear(out, self.out_proj.weight, self.out_proj.bias)
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        if not self.batch_first:
            out = out.transpose(0, 1)
        return (out if batched else out.squeeze(0 if self.batch_first else 1)), weights

    def _forward_of_nested(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Any, attn_mask: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The nested tensor that nn.TransformerEncoder makes of a padded batch in inference: padded again meanwhile."""
        if key is not query or value is not query or query.layout is not torch.strided or not self.batch_first:
            raise DspattnError(
                ["query: expected a strided tensor, or a nested one with batch_first that is key and value too"]
            )
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None:
                raise DspattnError([f"{name}: expected None beside a nested tensor, got a mask"])
        padded = torch.nested.to_padded_tensor(query, 0.0)
        lengths = torch.tensor([part.shape[0] for part in query.unbind()], device=query.device)
        hidden = torch.arange(padded.shape[1], device=query.device) >= lengths[:, None]
        out, weights = self.forward(padded, padded, padded, key_padding_mask=hidden, **options)
        return torch._nested_tensor_from_mask(out, ~hidden), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        linear = torch.nn.functional.linear
        return (
            linear(query, weights[0], biases[0]),
            linear(key, weights[1], biases[1]),
            linear(value, weights[2], biases[2]),
        )

    def _heads(self, tensor: Tensor) -> Tensor:
        """[batch, n, embed_dim] as [batch, heads, n, head_dim], without a copy."""
        return tensor.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)


def _merged_mask(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    batch: int,
    heads: int,
    extra_keys: int,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """(boolean mask, True visible; additive bias) from masks in which True hides."""
    visible: Tensor | None = None
    bias: Tensor | None = None
    for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
        if mask is None:
            continue
        require_known(name, mask)
        if name == "key_padding_mask":
            if mask.dim() != 2:
                raise DspattnError([f"{name}: expected [n_k] for each sequence of the batch, got {list(mask.shape)}"])
            mask = mask[:, None, None, :]
        elif mask.dim() not in (2, 3):
            raise DspattnError([f"{name}: expected 2 or 3 dimensions, got {list(mask.shape)}"])
        elif mask.dim() == 3:
            mask = mask.unflatten(0, (batch, heads))
        else:
            mask = mask[None, None]
        mask = torch.nn.functional.pad(mask, (0, extra_keys)) if extra_keys else mask
        if mask.dtype == torch.bool:
            visible = ~mask if visible is None else visible & ~mask
        elif mask.is_floating_point():
            mask = mask.to(dtype)
            bias = mask if bias is None else bias + mask
        else:
            raise DspattnError([f"{name}: expected a boolean or floating tensor, got {mask.dtype}"])
    return visible, bias
