"""What cutting a sequence over GPUs would cost: a model on paper, with one GPU's measured rates.

    python experiments/parallel/simulate.py                          # a table; --write puts it into docs/parallel.md
    python experiments/parallel/simulate.py --inter 25 --d 64        # slower links, smaller heads
    python experiments/parallel/simulate.py --check measured.json    # against runs of experiments/parallel/measure.py

Forward, causal, bf16 2:4, balanced. Per rank and step the time is max(computing, sending); computing runs at the rate
that bench/results/forward_h200.json has for a sequence of the chunk's length, the nearest one measured.

    ring         world steps; in each n^2 / (2 world^2) scores, n / world keys and values sent on over the slowest link
    all_to_all   heads / world heads of the whole sequence; q, k, v and the output exchanged before and after, unhidden
    both         all_to_all inside a node, ring over nodes: the ring carries kv_heads / node heads of n / nodes rows
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024)
LENGTHS = {"128k": 1 << 17, "512k": 1 << 19, "1M": 1 << 20, "4M": 1 << 22, "10M": 10 << 20}
ELEMENT_BYTES = 2  # bf16


@dataclass(frozen=True)
class Machine:
    rates: dict[int, float]  # keys of a sequence -> scores' multiply-adds, as tflops of the dense count
    intra: float  # bytes per second and direction between GPUs of a node
    inter: float  # ... and of different nodes
    latency: float  # seconds of a transfer, whatever its size
    node: int  # GPUs

    def rate(self, rows: float) -> float:
        nearest = min(self.rates, key=lambda n: abs(math.log(max(rows, 1) / n)))
        return self.rates[nearest] * 1e12

    def link(self, world: int) -> float:
        return self.intra if world <= self.node else self.inter


@dataclass(frozen=True)
class Model:
    heads: int
    kv_heads: int
    d: int


def alone(n: int, model: Model, machine: Machine) -> float:
    return 4 * model.heads * model.d * n * n / 2 / machine.rate(n)


def ring(n: int, world: int, model: Model, machine: Machine, link: float, heads: int, kv_heads: int) -> float:
    """A ring of `world` members, each with so many heads of n / world rows."""
    scores = n * n / 2 / world**2
    compute = 4 * heads * model.d * scores / machine.rate(n / world / 2)
    send = 2 * n / world * kv_heads * model.d * ELEMENT_BYTES / link + machine.latency
    return (world - 1) * max(compute, send) + compute


def all_to_all(n: int, world: int, model: Model, machine: Machine, link: float) -> float:
    """n rows over `world` members, by heads."""
    heads, kv_heads = math.ceil(model.heads / world), math.ceil(model.kv_heads / world)
    compute = 4 * heads * model.d * n * n / 2 / machine.rate(n)
    rows = n * (world - 1) / world
    received = rows * (heads + 2 * kv_heads) * model.d + n / world * model.heads * model.d
    return compute + received * ELEMENT_BYTES / link + 2 * machine.latency


def both(n: int, world: int, model: Model, machine: Machine) -> float:
    """All-to-all inside a node, ring over nodes."""
    node = min(machine.node, world)
    nodes = world // node
    heads, kv_heads = math.ceil(model.heads / node), math.ceil(model.kv_heads / node)
    exchange = n / nodes * (heads + 2 * kv_heads) * model.d + n / world * model.heads * model.d
    local = exchange * ELEMENT_BYTES / machine.intra + 2 * machine.latency
    return local + ring(n, nodes, model, machine, machine.link(world), heads, kv_heads)


def efficiencies(n: int, world: int, model: Model, machine: Machine) -> dict[str, float]:
    ideal = alone(n, model, machine) / world
    link = machine.link(world)
    return {
        "ring": ideal / ring(n, world, model, machine, link, model.heads, model.kv_heads),
        "all_to_all": ideal / all_to_all(n, world, model, machine, link),
        "both": ideal / both(n, world, model, machine),
    }


def measured_rates(path: Path, d: int) -> dict[int, float]:
    rows = json.loads(path.read_text())["rows"]
    rates = {
        row["n_k"]: row["tflops"]
        for row in rows
        if row["pattern"] == "2:4" and row["dtype"] == "bf16" and row["d"] == d and row["mask"] == "causal"
        and row["n_q"] == row["n_k"] and row["heads"] == row["kv_heads"] and row["part"] == "table"
    }  # fmt: skip
    if not rates:
        raise SystemExit(f"d: expected a head dimension with causal 2:4 bf16 rows in {path}, got {d}")
    return rates


def table(model: Model, machine: Machine) -> str:
    lines = ["| GPUs | " + " | ".join(LENGTHS) + " |", "|---|" + "---|" * len(LENGTHS)]
    for world in WORLDS:
        cells = []
        for n in LENGTHS.values():
            found = efficiencies(n, world, model, machine)
            best = max(found, key=lambda name: found[name])
            shown = ", ".join(f"{100 * found[name]:.0f}" for name in ("ring", "all_to_all", "both"))
            cells.append(f"{shown} ({best})")
        lines.append(f"| {world} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_page(path: Path, text: str) -> None:
    """Puts the table between the page's two marks."""
    begin, end = "<!-- simulated, written by experiments/parallel/simulate.py -->\n", "<!-- end of simulated -->"
    page = path.read_text()
    head, rest = page.split(begin)
    path.write_text(head + begin + text + "\n" + end + rest.split(end)[1])


def draw(model: Model, machine: Machine, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(LENGTHS), figsize=(14, 3.2), sharey=True)
    for axis, (name, n) in zip(axes, LENGTHS.items(), strict=True):
        for method, style in (("ring", "o-"), ("all_to_all", "s--"), ("both", "^:")):
            values = [100 * efficiencies(n, world, model, machine)[method] for world in WORLDS]
            axis.plot(WORLDS, values, style, label=method, markersize=4)
        axis.set(xscale="log", title=f"{name} tokens", xlabel="GPUs", ylim=(0, 105))
        axis.set_xticks(WORLDS[::2], [str(world) for world in WORLDS[::2]])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("efficiency, %")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def check(path: Path) -> list[tuple[str, float, float]]:
    """(case, measured, computed) seconds of runs of several processes, with the rate of the one-process run and the
    links as measured there; links that cost nothing where they were not."""
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    found = []
    for row in rows:
        alone_row = next(r for r in rows if r["world"] == 1 and all(r[k] == row[k] for k in ("n", "backward")))
        if row["world"] == 1:
            continue
        model = Model(row["heads"], row["heads"], row["d"])
        flops = 4 * row["heads"] * row["d"] * row["n"] ** 2 / 2
        link = row.get("link_bytes_per_second", math.inf) * ELEMENT_BYTES / 4  # what travels here is in fp32
        machine = Machine({row["n"]: flops / alone_row["seconds"] / 1e12}, link, link, 0.0, row["world"])
        if row["method"] == "ring":
            computed = ring(row["n"], row["world"], model, machine, link, row["heads"], row["heads"])
        else:
            computed = all_to_all(row["n"], row["world"], model, machine, link)
        passes = "forward and backward" if row["backward"] else "forward"
        found.append((f"{row['method']}, {passes}, {row['world']} processes", row["seconds"], computed))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--d", type=int, default=128)
    parser.add_argument("--intra", type=float, default=450, help="GB/s and direction inside a node (NVLink 4: 450)")
    parser.add_argument("--inter", type=float, default=50, help="GB/s and GPU between nodes (one 400 Gb/s link: 50)")
    parser.add_argument("--latency", type=float, default=10, help="microseconds of a transfer")
    parser.add_argument("--node", type=int, default=8, help="GPUs of a node")
    parser.add_argument("--rates", type=Path, default=ROOT / "bench/results/forward_h200.json")
    parser.add_argument("--write", action="store_true", help="into docs/parallel.md, with its picture")
    parser.add_argument("--check", type=Path, help="results of measure.py")
    options = parser.parse_args()
    if options.check:
        for case, measured, computed in check(options.check):
            print(f"{case}: measured {measured:.3f} s, computed {computed:.3f} s")
        return
    model = Model(options.heads, options.kv_heads, options.d)
    rates = measured_rates(options.rates, options.d)
    machine = Machine(rates, options.intra * 1e9, options.inter * 1e9, options.latency * 1e-6, options.node)
    print(table(model, machine))
    if options.write:
        write_page(ROOT / "docs/parallel.md", table(model, machine))
        draw(model, machine, ROOT / "docs/images/parallel.png")


if __name__ == "__main__":
    main()
