"""``dspattn.propose``: which layers of a model to leave dense, measured on the user's own inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import DspattnError
from .patterns import Grouping
from .switching import apply, called, restore


@dataclass(frozen=True)
class Proposal:
    """What pruning each layer alone costs, and which to leave dense."""

    losses: Mapping[str, float]  # by the layer's name, in the order of the calls
    skip: tuple[str, ...]  # what to give to :func:`dspattn.apply`
    unit: str

    def __str__(self) -> str:
        lines = [f"{self.unit}, each layer pruned alone; left dense: {', '.join(self.skip) or 'none'}"]
        return "\n".join(lines + [f"  {name}: {loss:.3g}" for name, loss in self.losses.items()])


def propose(
    model: torch.nn.Module,
    pattern: str = "2:4",
    *,
    example: Any,
    grouping: Grouping = "interleaved",
    share: float = 0.5,
    measure: Callable[[Any], float] | None = None,
) -> Proposal:
    """Prune one layer after the other and see what it costs.

    Args:
        model: as in :func:`dspattn.apply`; it is left as it was.
        pattern: ``"N:M"``.
        example: what the model is called with, as in :func:`dspattn.apply`: a text of the kind it will see, long enough
            for something to be pruned.
        grouping: ``"interleaved"`` or ``"consecutive"``.
        share: the fewest layers that together carry this share of all losses are proposed to be left dense.
        measure: the loss of an output. Default: its ``loss``, where the model returns one (``example`` has labels);
            otherwise by how much the output moves, relative to its length.

    Returns:
        The loss of every layer over that of the dense model, and the layers to give to ``apply(..., skip=...)``.

    Example:
        >>> encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 2, batch_first=True), 3).eval()
        >>> proposal = propose(encoder, "1:2", example=torch.randn(1, 100, 32))
        >>> list(proposal.losses)
        ['layers.0.self_attn', 'layers.1.self_attn', 'layers.2.self_attn']
        >>> 1 <= len(proposal.skip) <= 2
        True
    """
    if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 <= share <= 1:
        raise DspattnError([f"share: expected a number between 0 and 1, got {share!r}"])
    if measure is not None and not callable(measure):
        raise DspattnError([f"measure: expected a function of an output, got {measure!r}"])
    layers = apply(model, "dense", example=example).changed
    restore(model)
    dense = called(model, example)
    of_dense, judge, unit = _judge(dense, measure)
    losses: dict[str, float] = {}
    for layer in layers:
        apply(model, pattern, example=example, grouping=grouping, layers=[layer.index])
        try:
            losses[layer.name] = loss = judge(called(model, example)) - of_dense
        finally:
            restore(model)
        if not math.isfinite(loss):
            raise DspattnError([f"measure: expected a number for the outputs with {layer.name} pruned, got {loss}"])
    return Proposal(losses, _costliest(losses, share), unit)


def _costliest(losses: Mapping[str, float], share: float) -> tuple[str, ...]:
    """The fewest names that together carry a share of what is lost, in the order given."""
    total = sum(loss for loss in losses.values() if loss > 0)
    chosen: set[str] = set()
    carried = 0.0
    for name in sorted(losses, key=lambda name: -losses[name]):
        if carried >= share * total or losses[name] <= 0:
            break
        chosen.add(name)
        carried += losses[name]
    return tuple(name for name in losses if name in chosen)


def _judge(dense: Any, measure: Callable[[Any], float] | None) -> tuple[float, Callable[[Any], float], str]:
    """(what the dense output scores, the function that scores one, what the score is)."""
    if measure is not None:
        return float(measure(dense)), lambda output: float(measure(output)), "loss"
    if getattr(dense, "loss", None) is not None:
        return float(dense.loss), lambda output: float(output.loss), "increase of the model's loss"
    reference = _first(dense)
    length = reference.norm().clamp_min(torch.finfo(reference.dtype).tiny)
    return 0.0, lambda output: float((_first(output) - reference).norm() / length), "relative change of the output"


def _first(output: Any) -> Tensor:
    """The output's first floating tensor: logits, or hidden states."""
    if isinstance(output, Tensor):
        return output
    for value in output.values() if isinstance(output, Mapping) else output:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise DspattnError([f"measure: expected one for a model that returns {type(output).__name__} without tensors"])
