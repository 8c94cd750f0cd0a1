"""Draws bench/results/forward_*.json: TFLOP/s of the fused forward beside its peers, one panel per (head dim, mask).

python3 -m bench.forward.plot bench/results/forward_h200.json docs/images/forward_h200.png
"""

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(source, target):
    with open(source, encoding="utf-8") as file:
        result = json.load(file)
    rows = [
        r
        for r in result["rows"]
        if r.get("part", "table") == "table"
        and r["mode"] == "burst"
        and r["dtype"] == "bf16"
        and r["kv_heads"] == r["heads"]
        and r["grouping"] == "interleaved"
    ]
    panels = [(d, mask) for d in (64, 128) for mask in ("full", "causal")]
    figure, axes = plt.subplots(1, len(panels), figsize=(16, 4), sharey=True)
    for axis, (d, mask) in zip(axes, panels, strict=False):
        for pattern in ("2:4", "1:2"):
            cells = sorted(
                (r["n_q"], r["tflops"]) for r in rows if (r["d"], r["mask"], r["pattern"]) == (d, mask, pattern)
            )
            axis.plot(*zip(*cells, strict=False), marker="o", label=f"dspattn {pattern}")
        for peer in ("cudnn", "flash2", "efficient", "unfused"):
            cells = sorted(
                (r["n_q"], r["peers"][peer]["tflops"])
                for r in rows
                if (r["d"], r["mask"], r["pattern"]) == (d, mask, "2:4") and r["peers"].get(peer)
            )
            if cells:
                axis.plot(*zip(*cells, strict=False), marker=".", linestyle="--", label=peer)
        axis.set(xscale="log", xlabel="n", title=f"d = {d}, {mask}")
        axis.set_xticks([256, 512, 1024, 4096, 16384], [256, 512, 1024, 4096, 16384])
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("TFLOP/s (dense-equivalent)")
    axes[0].legend(fontsize=8)
    figure.suptitle(f"Forward, {result['device']['name']}, 16,384 tokens, hidden size 2048")
    figure.tight_layout()
    figure.savefig(target)


if __name__ == "__main__":
    main(*sys.argv[1:3])
