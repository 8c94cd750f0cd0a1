"""The pictures of docs/theory.md, from the JSON files alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from . import correlation, measured_times, result_files
from .formulas import MODELS
from .search import Search, search_power

Rows = list[dict[str, Any]]

COLOURS = {
    "1:2": "#1b6ca8",
    "2:4": "#c8553d",
    "1:4": "#5f8d4e",
    "4:8": "#8e6c8a",
    "top-k": "#444444",
    "fixed": "#b8860b",
    "consecutive": "#c8553d",
    "interleaved": "#1b6ca8",
    "row": "#5f8d4e",
}

NOTHING_LOST = 1e-5  # where a logarithmic axis puts rules that lost nothing


def _of(rows: Rows, **wanted: Any) -> Rows:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def _save(figure: Figure, folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
    return path


def _panels(count: int, width: float = 5.2, height: float = 4.0) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(1, count, figsize=(width * count, height), squeeze=False, layout="constrained")
    for axis in axes[0]:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def quality_curves(theory: Rows) -> Figure:
    """Lost share 1 - Q against the spread p sigma: long rows, finite rows, simulation."""
    figure, (axis, linear) = _panels(2)
    spread, simulated = _of(theory, set="spread"), _of(theory, set="simulated")
    for rule in ("1:2", "2:4", "1:4", "4:8", "top-k"):
        rows = [r for r in spread if r["rule"] == rule and (rule != "top-k" or r["density"] == 0.02)]
        x = np.array([r["p"] * r["sigma"] for r in rows])
        label = "top-k 2 %" if rule == "top-k" else rule
        limit = np.array([r["long_rows"] for r in rows])
        finite = np.array([r["finite_rows"] for r in rows])
        axis.semilogy(x, np.maximum(1 - limit, 1e-12), color=COLOURS[rule], lw=1, ls="--")
        axis.semilogy(x, 1 - finite, color=COLOURS[rule], lw=1.8, label=label)
        linear.plot(x, limit, color=COLOURS[rule], lw=1, ls="--")
        linear.plot(x, finite, color=COLOURS[rule], lw=1.8, label=label)
        dots = [r for r in simulated if r["rule"] == rule]
        if dots:
            x_dots = [r["p"] * r["sigma"] for r in dots]
            loss = np.array([1 - r["monte_carlo"] for r in dots])
            bars = np.array([1.96 * r["standard_error"] for r in dots])
            low = np.minimum(bars, loss * 0.9)
            axis.errorbar(x_dots, loss, np.array([low, bars]), fmt="o", ms=3, color=COLOURS[rule], lw=1)
            linear.errorbar(x_dots, 1 - loss, bars, fmt="o", ms=3, color=COLOURS[rule], lw=1)
    axis.axvline(7, color="black", lw=0.8, ls=":")
    axis.text(7.1, 0.3, r"the paper's $p\sigma = 7$", fontsize=8)
    axis.set(xlabel=r"spread $p\sigma$", ylabel=r"lost share $1 - Q^p$", ylim=(1e-11, 1.2))
    axis.set_title("Rows of 1024 keys (solid) against the long-row limit (dashed)", fontsize=10)
    linear.axhline(0.63, color=COLOURS["fixed"], lw=1.5, label="fixed 63 %")
    linear.set(xlabel=r"spread $p\sigma$", ylabel=r"quality $Q^p$", xlim=(0, 5), ylim=(0, 1.02))
    linear.set_title("The same, linear; dots: simulation, 95 % bars", fontsize=10)
    linear.legend(fontsize=8, loc="lower right")
    return figure


def box_plot(maps: dict[str, Any], theory: Rows, model: str) -> Figure:
    """The paper's box plot: Q^p over the heads of a model, with the theory at sigma = 1 and at the median sigma."""
    powers = maps["powers"]
    names = [
        "topk 0.02", "topk 0.05", "topk 0.1", "topk 0.25", "topk 0.5",
        "truncated 0.5", "truncated 0.63", "strided 0.5", "strided 0.63", "window 0.5", "window 0.63",
        "1:4 consecutive", "1:4 interleaved", "1:2 consecutive", "1:2 interleaved",
        "2:4 consecutive", "2:4 interleaved", "4:8 consecutive", "4:8 interleaved",
    ]  # fmt: skip
    figure, axes = plt.subplots(len(powers), 1, figsize=(11, 2.6 * len(powers)), sharex=True, layout="constrained")
    sigmas = sorted({row["sigma"] for row in _of(theory, set=f"heads {model}")})
    for axis, (index, power) in zip(axes, enumerate(powers), strict=True):
        data = [[head["quality"][name][index] for head in maps["rows"]] for name in names]
        shades = [COLOURS["top-k" if n.startswith("topk") else n.split(" ")[0] if ":" in n else "fixed"] for n in names]
        boxes = axis.boxplot(data, whis=(5, 95), showfliers=False, patch_artist=True, widths=0.6)
        for box, shade in zip(boxes["boxes"], shades, strict=True):
            box.set(facecolor=shade, alpha=0.45)
        for line in boxes["medians"]:
            line.set(color="black")
        rows = {
            (row["rule"], round(row["density"], 3), row["sigma"]): row
            for row in _of(theory, set=f"heads {model}", p=power)
        }
        for sigma, marker in zip(sigmas, "xD", strict=False):
            values = []
            for name in names:
                kind, last = name.split(" ")
                if kind == "topk":
                    row = rows["top-k", float(last), sigma]
                elif ":" in kind:
                    row = next(r for key, r in rows.items() if key[0] == kind and key[2] == sigma)
                else:
                    row = rows["fixed", float(last), sigma]
                values.append(row["finite_rows"])
            label = rf"theory, independent scores, $\sigma$ = {sigma:.3g}" + ("" if sigma == 1 else " (median head)")
            axis.plot(range(1, len(names) + 1), values, marker, ms=5, color="black" if sigma == 1 else "red",
                      mfc="none", label=label)  # fmt: skip
        axis.set(ylabel=rf"$Q^{{{power:g}}}$", ylim=(-0.02, 1.03))
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8, loc="lower left", ncols=2)
    axes[0].set_title(
        f"{model}: $Q^p$ of {len(maps['rows'])} heads; boxes: quartiles, whiskers: 5 % and 95 %", fontsize=10
    )
    short = {"topk": "top-k", "truncated": "trunc.", "consecutive": "cons.", "interleaved": "interl."}
    ticks = ["\n".join(short.get(part, part) for part in name.split(" ")) for name in names]
    axes[-1].set_xticks(range(1, len(names) + 1), ticks, fontsize=9)
    return figure


def _goodness(rows: Rows) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = np.array([row["value"] for row in rows])
    return -np.log(values) if rows[0]["metric"] == "perplexity" else values


def task_search(tasks: dict[str, Any], model: str) -> tuple[Rows, Search]:
    """The rows of a model's task and the outcome of the search for p on them."""
    rows = [row for row in _of(tasks["rows"], model=model) if row["family"] != "dense" and " row" not in row["rule"]]
    quality = np.array([row["quality"] for row in rows])
    anchor = np.array([row["family"] in ("topk", "fixed") for row in rows])
    return rows, search_power(np.array(tasks["powers"]), quality, _goodness(rows), anchor)


def task_line(tasks: dict[str, Any], model: str) -> Figure:
    """The paper's monotonic line: task quality against Q^p at the p found, against the norm kept, and the search."""
    rows, found = task_search(tasks, model)
    figure, (line, norm, search) = _panels(3, 4.6, 4.0)
    column = int(np.argmin(abs(np.array(tasks["powers"]) - found.best)))
    dense = _of(tasks["rows"], model=model, rule="dense")[0]["value"]
    for axis, key in ((line, "quality"), (norm, "frobenius")):
        for row in rows:
            x = max(1 - (row["quality"][column] if key == "quality" else row["frobenius"]), NOTHING_LOST)
            family = row["family"]
            kind = "top-k" if family == "topk" else "fixed" if family == "fixed" else row["rule"].split(" ")[0]
            marker = "s" if family == "topk" else "^" if family == "fixed" else "o"
            fill = COLOURS[kind] if "consecutive" not in row["rule"] else "none"
            axis.plot(x, row["value"], marker, color=COLOURS[kind], mfc=fill, ms=6)
        axis.axhline(dense, color="black", lw=0.8, ls=":")
        axis.set_xscale("log")
        axis.invert_xaxis()
        if rows[0]["metric"] == "perplexity":
            axis.set_yscale("log")
            axis.invert_yaxis()
    line.set(
        xlabel=rf"lost share $1 - Q^p$ at p = {found.best:g} (less to the right)",
        ylabel=f"{rows[0]['metric']}, {rows[0]['task']} (better upwards)",
    )
    line.set_title(f"{model}: {found.pairs_wrong} of {found.pairs} pairs out of order", fontsize=10)
    norm.set(xlabel="lost share of the row's Euclidean norm")
    norm.set_title("The norm as measure", fontsize=10)
    search.plot(found.powers, found.curve, color=COLOURS["top-k"])
    search.axvline(found.best, color="black", lw=0.8, ls=":")
    search.set(xlabel="p", ylabel="variance not explained by a monotonic line")
    search.set_title("Search for p on top-k and fixed", fontsize=10)
    handles = [
        Line2D([], [], marker=m, color=COLOURS[k], mfc=COLOURS[k] if f else "none", ls="", label=t)
        for m, k, f, t in (
            ("s", "top-k", 1, "top-k"), ("^", "fixed", 1, "fixed"), ("o", "1:2", 1, "1:2 interleaved"),
            ("o", "1:2", 0, "1:2 consecutive"), ("o", "2:4", 1, "2:4"), ("o", "1:4", 1, "1:4"), ("o", "4:8", 1, "4:8"),
        )
    ]  # fmt: skip
    line.legend(handles=handles, fontsize=7, loc="best")
    return figure


def correlation_curves(maps: dict[str, dict[str, Any]], mixtures: dict[str, str]) -> Figure:
    """Correlation of scores along the keys, measured and fitted, with the distances inside groups."""
    figure, axes = _panels(len(maps))
    for axis, (model, content) in zip(axes, maps.items(), strict=True):
        lags = np.array(content["lags"])
        heads = np.array([[head["rho"][str(lag)] for lag in lags] for head in content["rows"]])
        axis.fill_between(lags, *np.percentile(heads, [10, 90], axis=0), color=COLOURS["interleaved"], alpha=0.15,
                          label="heads, 10 % to 90 %")  # fmt: skip
        axis.plot(lags, content["mean_correlation"], "o-", ms=4, color=COLOURS["interleaved"], label="mean of heads")
        pairs = [part.split(":") for part in mixtures[model].split(",")]
        fine = np.arange(1, 128, dtype=np.float64)
        fitted = correlation.evaluate([(float(w), float(d)) for w, d in pairs], fine)
        axis.plot(fine, fitted, color="black", lw=1, ls="--", label="fit used in the simulation")
        for lag, text in ((1, "consecutive"), (32, "2:4 interleaved"), (64, "1:2 interleaved")):
            axis.axvline(lag, color="grey", lw=0.7, ls=":")
            axis.text(lag * 1.05, 0.93, text, fontsize=7, rotation=90, va="top")
        axis.set(xscale="log", xlabel="distance in keys", ylabel="correlation of scores", ylim=(-0.2, 1.0))
        axis.set_title(model, fontsize=10)
        axis.legend(fontsize=8, loc="lower left")
    return figure


def grouping_heads(maps: dict[str, dict[str, Any]], predictions: Rows) -> Figure:
    """Kept weight of every head, predicted from its deviation and correlations, against the measured one."""
    figure, axes = plt.subplots(2, 3, figsize=(13, 8), layout="constrained", squeeze=False)
    for line, (model, content) in zip(axes, maps.items(), strict=True):
        predicted = _of(predictions, model=model)
        for axis, pattern in zip(line, ("1:2", "2:4"), strict=False):
            for grouping in ("consecutive", "interleaved"):
                name = f"{pattern} {grouping}"
                x = np.array([head["predicted"][name] for head in predicted])
                y = np.array([head["quality"][name][0] for head in content["rows"]])
                axis.scatter(1 - x, 1 - y, s=9, alpha=0.6, color=COLOURS[grouping],
                             label=f"{grouping}: r = {np.corrcoef(x, y)[0, 1]:.2f}")  # fmt: skip
            axis.plot([1e-5, 1], [1e-5, 1], color="black", lw=0.8)
            axis.set(xscale="log", yscale="log", xlim=(1e-4, 0.6), ylim=(1e-4, 0.6))
            axis.set(xlabel="lost weight, model", ylabel="lost weight, measured")
            axis.set_title(f"{model}, {pattern}", fontsize=10)
            axis.legend(fontsize=8, loc="upper left")
            axis.grid(alpha=0.25)
        gap = line[2]
        for pattern, shade in (("1:2", COLOURS["1:2"]), ("2:4", COLOURS["2:4"])):
            names = [f"{pattern} {grouping}" for grouping in ("interleaved", "consecutive")]
            x = np.array([head["predicted"][names[0]] - head["predicted"][names[1]] for head in predicted])
            y = np.array([head["quality"][names[0]][0] - head["quality"][names[1]][0] for head in content["rows"]])
            gap.scatter(x, y, s=9, alpha=0.6, color=shade, label=f"{pattern}: r = {np.corrcoef(x, y)[0, 1]:.2f}")
        top = max(gap.get_xlim()[1], gap.get_ylim()[1])
        gap.plot([0, top], [0, top], color="black", lw=0.8)
        gap.set(xlabel="weight saved by interleaving, model", ylabel="measured")
        gap.set_title(f"{model}: interleaved minus consecutive", fontsize=10)
        gap.legend(fontsize=8, loc="upper left")
        gap.grid(alpha=0.25)
    return figure


def grouping_curves(theory: Rows, maps: dict[str, dict[str, Any]]) -> Figure:
    """Kept weight against the deviation of the scores: closed form, simulation, measured heads without their sink."""
    figure, axes = _panels(2)
    for axis, (model, content) in zip(axes, maps.items(), strict=True):
        for grouping in ("consecutive", "interleaved"):
            name = f"2:4 {grouping}"
            rows = _of(theory, set=f"grouping {model}", rule=name)
            sigma = [row["sigma"] for row in rows]
            axis.plot(
                sigma, [row["closed_form"] for row in rows], color=COLOURS[grouping], label=f"{grouping}, closed form"
            )
            axis.errorbar(sigma, [row["monte_carlo"] for row in rows], [1.96 * row["standard_error"] for row in rows],
                          fmt="s", ms=4, mfc="none", color=COLOURS[grouping], label="simulation, 384 keys")  # fmt: skip
            heads = [head for head in content["rows"] if head["sink"] < 0.98]
            rest = [(h["quality"][name][0] - h["sink"]) / (1 - h["sink"]) for h in heads]
            axis.scatter([h["sigma"] for h in heads], rest, s=6, alpha=0.35, color=COLOURS[grouping], label="heads")
        axis.set(xlabel=r"deviation $\sigma$ of the scores", ylabel="kept weight, first key apart", xlim=(0, 5.2))
        axis.set(ylim=(0.45, 1.01))
        axis.set_title(f"{model}, 2:4", fontsize=10)
        axis.legend(fontsize=7, loc="lower right")
    return figure


def grouping_task(tasks: dict[str, Any], maps: dict[str, Any], predictions: Rows, measured: Rows) -> Figure:
    """Loss of perplexity against lost weight: every N:M rule on this page's sample, and the longer measurement.

    The second panel sets the longer measurement (95 % intervals) against the weight lost on the maps, measured and as
    the model of correlated scores predicts it; it is left out where ``measured`` is empty.
    """
    figure, axes = _panels(2 if measured else 1, 5.6, 4.4)
    axis = axes[0]
    rows = _of(tasks["rows"], model="SmolLM2-135M")
    dense = _of(rows, rule="dense")[0]["value"]
    column = tasks["powers"].index(1.0)
    for row in rows:
        if row["family"] != "nm":
            continue
        pattern, grouping = row["rule"].split(" ")
        x, y = 1 - row["quality"][column], 100 * (row["value"] / dense - 1)
        axis.plot(x, y, "o", color=COLOURS[grouping])
        place = {"consecutive": (6, -10), "row": (-6, -15), "interleaved": (-8, 8)}[grouping]
        if row["rule"] == "2:4 interleaved":
            place = (-8, -15)  # 4:8 is right above it
        axis.annotate(pattern, (x, y), xytext=place, textcoords="offset points", fontsize=8, color=COLOURS[grouping])
    for grouping in ("consecutive", "row", "interleaved"):
        axis.plot([], [], "o", color=COLOURS[grouping], label=grouping if grouping != "row" else "spread over the row")
    axis.set_title(f"SmolLM2-135M, {tasks['counts']['WikiText-2']:,} tokens, windows of 512", fontsize=10)
    for row in measured:
        name = f"{row['pattern']} {row['grouping']}"
        shade = COLOURS[row["grouping"]]
        lost = 1 - float(np.mean([head["quality"][name][0] for head in maps["rows"]]))
        model = 1 - float(np.mean([head["predicted"][name] for head in _of(predictions, model="SmolLM2-135M")]))
        bars = np.array([[row["change"] - row["change_low"]], [row["change_high"] - row["change"]]])
        axes[1].errorbar(lost, row["change"], bars, fmt="o", color=shade, capsize=3, lw=1)
        axes[1].plot(model, row["change"], "D", mfc="none", color=shade)
        left = row["grouping"] == "consecutive"
        axes[1].annotate(row["pattern"], (lost, row["change"]), xytext=(-7 if left else 7, 5), fontsize=8, color=shade,
                         textcoords="offset points", ha="right" if left else "left")  # fmt: skip
    if measured:
        axes[1].plot([], [], "o", color="black", label="lost weight measured")
        axes[1].plot([], [], "D", color="black", mfc="none", label="lost weight by the model")
        axes[1].set_title("SmolLM2-135M, 6,144 tokens, windows of 1024", fontsize=10)
    for panel in axes:
        panel.axhline(0, color="black", lw=0.8, ls=":")
        panel.set_yscale("symlog", linthresh=2)
        panel.set_yticks([-1, 0, 1, 2, 5, 10, 20, 30], ["-1", "0", "1", "2", "5", "10", "20", "30"])
        panel.set(xlabel=r"lost weight $1 - Q^1$", ylabel="increase of perplexity, %", ylim=(-1.5, 50), xlim=(0, None))
        panel.legend(fontsize=8, loc="lower right" if panel is axis else "upper left")
    return figure


def _stage_bars(axis: Axes, theory: Rows, stages: measured_times.Stages) -> None:
    """Speedup of each stage at the longest timed length for which the model was evaluated: model and measured."""
    evaluated = {row["set"] for row in theory}
    names = ("scores", "softmax", "values")
    place, longest = 0.0, 0
    ticks: list[tuple[float, str]] = []
    for pattern, dtype in sorted({key[:2] for key in stages}):
        timed = [key for key in stages if key[:2] == (pattern, dtype) and f"length {key[2]} {key[3]}" in evaluated]
        if not timed:
            continue
        _, _, keys, dim = max(timed, key=lambda key: key[2])
        longest = max(longest, keys)
        rows = _of(theory, set=f"length {keys} {dim}")
        full, pruned = _of(rows, rule="full")[0], _of(rows, rule=pattern)[0]
        for name in names:
            axis.bar(place, full[name] / pruned[name], 0.4, color=COLOURS[pattern], alpha=0.4)
            axis.bar(place + 0.4, stages[pattern, dtype, keys, dim].get(name, 0.0), 0.4, color=COLOURS[pattern])
            ticks.append((place + 0.2, f"{name}\n{pattern}\n{dtype}"))
            place += 1.0
    axis.axhline(1, color="black", lw=0.8)
    axis.set_xticks([x for x, _ in ticks], [text for _, text in ticks], fontsize=7)
    axis.set(ylabel="speedup over unfused dense")
    axis.set_title(f"Stages, n = {longest}: model (pale), measured (full)", fontsize=10)


def speedups(theory: Rows, measured: measured_times.Measured, stages: measured_times.Stages) -> Figure:
    """The three speed models against density, and against length with measured times where there are any."""
    figure, axes = _panels(3 if stages else 2)
    density, length = axes[:2]
    if stages:
        _stage_bars(axes[2], theory, stages)
    rows = _of(theory, set="density")
    for rule, label, shade, style in (
        ("top-k", "top-k (upper bound)", "top-k", "-"),
        ("fixed", "fixed, V read whole", "fixed", "-"),
        ("fixed, V skipped", "fixed, V skipped", "fixed", "--"),
    ):
        part = _of(rows, rule=rule)
        density.loglog(
            [r["density"] for r in part], [r["speedup_long"] for r in part], style, color=COLOURS[shade], label=label
        )
    for rule in ("2:4", "1:4"):
        row = _of(rows, rule=rule)[0]
        density.axhline(row["speedup_long"], color=COLOURS[rule], lw=1, ls=":")
        density.plot(row["density"], row["speedup_long"], "o", color=COLOURS[rule], label=rule)
    density.axhline(1, color="black", lw=0.8)
    density.set(xlabel="density s", ylabel="speedup over full attention", ylim=(0.1, 60))
    density.set_title("Models, d = 64, T = 128, long sequences", fontsize=10)
    density.legend(fontsize=8)
    for dim, style in ((64, "-"), (128, "--")):
        for rule, label in (("2:4", "2:4"), ("Performer", "Performer"), ("top-k", "top-k 5 %")):
            points = [
                (int(row["set"].split(" ")[1]), row["speedup"])
                for row in _of(theory, rule=rule)
                if row["set"].startswith("length ") and row["set"].endswith(f" {dim}")
            ]
            shade = {"2:4": COLOURS["2:4"], "Performer": "#2a9d8f", "top-k": COLOURS["top-k"]}[rule]
            length.plot(*zip(*points, strict=True), style, color=shade, lw=1.3, label=f"{label}, d = {dim}")
    for series in measured:
        length.plot(
            series.keys, series.speedups, series.marker, ms=5, mfc="none", color=series.colour, label=series.label
        )
    length.axhline(1, color="black", lw=0.8)
    length.set(xscale="log", yscale="log", ylim=(0.2, 12), xlabel="keys n", ylabel="speedup over full attention")
    length.set_title("Models" + (" and measured times" if measured else ""), fontsize=10)
    length.legend(fontsize=6.5, ncols=2)
    return figure


def performer_errors(theory: Rows) -> Figure:
    """Relative error of one kernel value against its score."""
    figure, (axis,) = _panels(1, 6.4, 4.2)
    rows = [row for row in _of(theory, set="tables", section="performer") if row["score"] != "mean"]
    score = [row["score"] for row in rows]
    for key, label, shade in (
        ("mse_1:2", "1:2", COLOURS["1:2"]),
        ("mse_2:4", "2:4", COLOURS["2:4"]),
        ("performer_orthogonal", "Performer, 266 orthogonal features", "#2a9d8f"),
    ):
        axis.semilogy(score, [row[key] for row in rows], "o-", ms=4, color=shade, label=label)
    axis.set(xlabel=r"score $q \cdot k / \sqrt{d}$", ylabel=r"mean-square error / $SM^2$")
    axis.set_title(r"$|q|^2 = |k|^2 = d = 64$", fontsize=10)
    axis.legend(fontsize=8)
    return figure


def draw_all(results_folder: Path, pictures: Path, bench_folder: Path) -> list[Path]:
    """Every picture; returns their paths. Measured times are drawn where ``bench_folder`` has them."""
    formulas = result_files.read(results_folder / "theory.json")
    theory: Rows = formulas["rows"]
    predictions: Rows = result_files.read(results_folder / "prediction.json")["rows"]
    tasks = result_files.read_tasks(results_folder)
    maps = {model: result_files.read(results_folder / file) for model, file in MODELS.items()}
    quality_file = results_folder.parents[1] / "quality" / "results" / "wikitext2_1024.json"
    longer = [
        row
        for row in (result_files.read(quality_file)["rows"] if quality_file.is_file() else [])
        if row["metric"] == "perplexity" and row["grouping"] in ("consecutive", "interleaved")
    ]
    drawings: dict[str, Callable[[], Figure]] = {
        "quality_curves": lambda: quality_curves(theory),
        "box_minilm": lambda: box_plot(maps["MiniLM"], theory, "MiniLM"),
        "box_smollm2": lambda: box_plot(maps["SmolLM2-135M"], theory, "SmolLM2-135M"),
        "line_minilm": lambda: task_line(tasks, "MiniLM"),
        "line_smollm2": lambda: task_line(tasks, "SmolLM2-135M"),
        "correlation": lambda: correlation_curves(maps, formulas["mixtures"]),
        "grouping_heads": lambda: grouping_heads(maps, predictions),
        "grouping_curves": lambda: grouping_curves(theory, maps),
        "grouping_task": lambda: grouping_task(tasks, maps["SmolLM2-135M"], predictions, longer),
        "speedups": lambda: speedups(
            theory, measured_times.read_measured(bench_folder), measured_times.read_stages(bench_folder)
        ),
        "performer": lambda: performer_errors(theory),
    }
    return [_save(draw(), pictures, name) for name, draw in drawings.items()]
