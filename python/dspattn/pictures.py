"""Pictures of attention before and after pruning: maps of a few heads, and how much weight the kept keys carry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from . import inspection
from .patterns import Grouping

MAP_TOKENS = 192  # a block and a half of interleaved keys; single keys can still be seen in print
ROW_TOKENS = 1024
COLOURS = {"2:4": "#2a78d6", "1:2": "#1baf7a", "1:4": "#d95926", "4:8": "#7a5cc4"}
STYLE: dict[Grouping, str] = {"interleaved": "-", "consecutive": ":"}


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"})
    return plt


def attention_maps(
    layers: list[inspection.LayerInputs], layer: int, heads: list[int], patterns: list[str], path: Path
) -> None:
    """Weights of some heads of one layer, a column for dense and one for each pattern, into ``path``.

    The colour is the square root of the weight, so that small weights can be told from none.
    """
    plt = _pyplot()
    columns = ["dense", *patterns]
    figure, axes = plt.subplots(
        len(heads),
        len(columns),
        figsize=(2.9 * len(columns), 2.85 * len(heads) + 0.6),
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    with torch.inference_mode():
        weights = {name: layers[layer].weights(name, "interleaved")[0] for name in columns}
    for row, head in enumerate(heads):
        top = float(weights["dense"][head].max())
        for column, name in enumerate(columns):
            drawn = weights[name][head]
            axis = axes[row][column]
            masked = np.ma.masked_where(weights["dense"][head].numpy() == 0, drawn.sqrt().numpy())
            axis.imshow(masked, cmap="magma", vmin=0.0, vmax=top**0.5, interpolation="nearest")
            axis.set_xticks([]), axis.set_yticks([])
            for side in axis.spines.values():
                side.set_visible(False)
            if row == 0:
                axis.set_title(name)
            if column == 0:
                axis.set_ylabel(f"head {head}, query")
            else:
                kept = drawn > 0
                keys = 100 * float(kept.sum() / (weights["dense"][head] > 0).sum())
                weight = 100 * float((weights["dense"][head] * kept).sum(-1).mean())
                axis.set_xlabel(f"{keys:.0f} % of the keys, {weight:.1f} % of the weight", fontsize=8)
    figure.suptitle(f"Attention weights, layer {layer}, no fine-tuning (keys from left to right)", fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def kept_weight_shares(layers: list[inspection.LayerInputs], pattern: str, grouping: Grouping) -> NDArray[np.float64]:
    """Kept weight of every row of every head and layer that has more than one block of keys to see, flat."""
    rows = [inspection.kept_weight(layer, pattern, grouping)[:, 128:].flatten().double() for layer in layers]
    return torch.cat(rows).numpy()


def kept_weight_distribution(
    layers: list[inspection.LayerInputs], patterns: list[str], path: Path
) -> dict[tuple[str, Grouping], float]:
    """How the kept weight is distributed over rows, for both groupings, into ``path``; returns the means."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(6.4, 3.8))
    means: dict[tuple[str, Grouping], float] = {}
    groupings: list[Grouping] = ["interleaved", "consecutive"]
    for pattern in patterns:
        for grouping in groupings:
            shares = np.sort(kept_weight_shares(layers, pattern, grouping))
            means[pattern, grouping] = float(shares.mean())
            axis.plot(
                shares[:: max(1, len(shares) // 2000)],
                np.linspace(0.0, 100.0, len(shares))[:: max(1, len(shares) // 2000)],
                STYLE[grouping],
                color=COLOURS.get(pattern, "#888888"),
                linewidth=2,
                label=f"{pattern} {grouping} (mean {100 * means[pattern, grouping]:.1f} %)",
            )
    axis.set_xlim(0.5, 1.0)
    axis.set_ylim(0.0, 100.0)
    axis.set_xlabel("share of a row's dense weight that the kept keys carry")
    axis.set_ylabel("rows with at most that share, %")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, loc="upper left")
    axis.set_title("Weight kept per row: further right and lower is better", fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return means


def draw_demo(loaded: tuple[Any, Any], text: str, patterns: list[str], out: Path) -> list[Path]:
    """The demo's pictures, from a causal language model and its tokenizer; returns the files written."""
    model, tokenizer = loaded
    ids = torch.tensor(tokenizer(text)["input_ids"])
    maps, rows = out / "attention_maps.png", out / "kept_weight.png"
    attention_maps(inspection.capture(model, ids[:MAP_TOKENS]), 10, [0, 4, 7], patterns, maps)
    kept_weight_distribution(inspection.capture(model, ids[:ROW_TOKENS]), patterns, rows)
    return [maps, rows]
