"""The measurements: attention maps of MiniLM and SmolLM2-135M, and what each rule costs them at their tasks."""

from __future__ import annotations

import csv
import io
import lzma
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dspattn import evaluate, pretrained

from . import attention, result_files
from .maps import LAGS, MapObserver
from .rules import DENSE, INTERLEAVE_BLOCK, Grouping, Rule, at_density, nm

Array = NDArray[np.float64]

GROUPINGS: tuple[Grouping, ...] = ("consecutive", "interleaved")
NM_RULES = [nm(keep, group, grouping) for keep, group in ((1, 2), (2, 4), (1, 4), (4, 8)) for grouping in GROUPINGS]
# Equal density for every N:M above (1/2, 1/4), the densities of the paper's speed comparison (0.02, 0.63), and a sweep.
MAP_RULES = [
    *NM_RULES,
    *(at_density("topk", s) for s in (0.02, 0.05, 0.1, 0.25, 0.5)),
    *(at_density(kind, s) for kind in ("window", "strided", "truncated") for s in (0.25, 0.5, 0.63)),
]
# For tasks k is the same in every row, as in the paper: short causal rows then stay whole, as they do under N:M.
TASK_RULES = [
    *NM_RULES,
    nm(1, 2, "row"),
    nm(2, 4, "row"),
    *(at_density("topk", s, per_row=False) for s in (0.02, 0.05, 0.1, 0.25, 0.5)),
    *(at_density("window", s, per_row=False) for s in (0.1, 0.25, 0.5, 0.75)),
    *(at_density("strided", s, per_row=False) for s in (0.5, 0.75, 0.9)),
]
MAP_POWERS = (1.0, 2.0, 4.0, 7.0)  # the paper sweeps "several typical values" up to 7
# Values of the task on resampled items, the same items for every rule: the spread of a difference between two rules
# is that of the differences of their draws. Tokens are drawn in runs, since neighbours are not independent.
DRAWS = 200
RUN_TOKENS = 128
GPU_WINDOWS = 16  # of one pass on a GPU: enough that launches do not count
OBSERVED_WINDOWS = 32  # on which Q^p is averaged, at most
SEARCH_POWERS = tuple(np.round(np.concatenate([np.arange(0.1, 1.0, 0.1), np.arange(1.0, 10.01, 0.25)]), 2).tolist())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _versions() -> dict[str, str]:
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def _read_text(data: Path, *parts: str) -> str:
    path = data.joinpath(*parts)
    if not path.is_file():
        raise FileNotFoundError(f"--data: expected a folder with {'/'.join(parts)}, found none at {path}")
    return lzma.open(path, "rt", encoding="utf-8").read()


def wikitext_windows(tokenizer: Any, data: Path, tokens: int, window: int) -> list[torch.Tensor]:
    """The first ``tokens`` tokens of WikiText-2's test set in windows of ``window``."""
    text = _read_text(data, "wikitext2", "wiki.test.raw.xz")[: 8 * tokens]  # a token is some four characters
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0, :tokens]
    return list(ids[: len(ids) // window * window].view(-1, window))


def stsb_pairs(data: Path, count: int) -> tuple[list[str], list[str], Array]:
    """``count`` pairs of STS-B's test set, spread evenly over it, and their scores."""
    rows = [row for row in csv.reader(io.StringIO(_read_text(data, "stsb", "stsb-en-test.csv.xz"))) if len(row) == 3]
    chosen = [rows[int(i)] for i in np.linspace(0, len(rows) - 1, min(count, len(rows)))]
    return [r[0] for r in chosen], [r[1] for r in chosen], np.array([float(r[2]) for r in chosen])


def measure_maps(data: Path, out: Path, windows: int, rows_per_map: int) -> None:
    """Q^p per layer and head, sigma, correlation and sink of both models on WikiText-2.

    Only rows of 256 or more keys that fill whole blocks of 128 are measured: every rule then keeps its nominal share.
    """
    for name, load, stem, window, arguments in (
        ("MiniLM", pretrained.load_minilm, "maps_minilm", 512, {}),  # as long as its position embeddings go
        ("SmolLM2-135M", pretrained.load_smollm2, "maps_smollm2", 1024, {"use_cache": False}),
    ):
        began = time.monotonic()
        model, tokenizer = load()
        model.set_attn_implementation(attention.register())
        observer = MapObserver(
            MAP_RULES, MAP_POWERS, rows_per_map=rows_per_map, least_keys=256, keys_multiple_of=INTERLEAVE_BLOCK
        )
        base = model if name == "MiniLM" else model.model  # the maps do not need the vocabulary's logits
        with attention.using(observer=observer):
            for ids in wikitext_windows(tokenizer, data, windows * window, window):
                base(ids.unsqueeze(0), **arguments)
        _say(f"{name}: maps of {len(observer.layers)} layers in {time.monotonic() - began:.0f} s")
        result_files.write(
            out / f"{stem}.json",
            observer.head_rows(name),
            _versions(),
            text=f"WikiText-2 test, first {windows * window} tokens in windows of {window}",
            powers=list(MAP_POWERS),
            rules={rule.name: {"family": rule.family, "density": rule.density} for rule in MAP_RULES},
            mean_quality=observer.mean_quality(),
            lags=list(LAGS),
            mean_correlation=observer.mean_correlation(),
        )


def _task_rows(
    model: str,
    task: str,
    metric: str,
    values: dict[str, float],
    draws: dict[str, list[float]],
    rules: Sequence[Rule],
    observer: MapObserver,
) -> list[dict[str, Any]]:
    qualities, norms, densities = observer.mean_quality(), observer.mean_frobenius(), observer.mean_density()
    return [
        {
            "model": model,
            "task": task,
            "metric": metric,
            "rule": rule.name,
            "family": rule.family,
            "density": rule.density,
            "measured_density": densities[rule.name],
            "value": round(values[rule.name], 5),
            "frobenius": norms[rule.name],
            "quality": qualities[rule.name],
            "draws": [round(value, 5) for value in draws[rule.name]],
        }
        for rule in rules
    ]


def _resampled(items: int) -> NDArray[np.int64]:
    """[DRAWS, items]: which items each draw takes; the same for every rule."""
    return np.random.default_rng(0).integers(0, items, (DRAWS, items))


def _drawn_perplexities(losses: Sequence[Array]) -> list[float]:
    runs = [run for window in losses for run in np.split(window, range(RUN_TOKENS, len(window), RUN_TOKENS))]
    sums, counts = np.array([run.sum() for run in runs]), np.array([len(run) for run in runs])
    chosen = _resampled(len(runs))
    drawn: list[float] = np.exp(sums[chosen].sum(1) / counts[chosen].sum(1)).tolist()
    return drawn


def _losses(model: Any, windows: torch.Tensor, at_once: int) -> list[Array]:
    """Next-token losses of every window, so many windows in a pass."""
    found: list[Array] = []
    for part in windows.split(at_once):
        logits = model(part, use_cache=False).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), part[:, 1:], reduction="none")
        found += list(losses.double().cpu().numpy())
    return found


def _perplexities(windows: torch.Tensor, device: str) -> Iterator[list[dict[str, Any]]]:
    """The rows so far, after every rule: a run that is cut off has measured something."""
    model, _ = pretrained.load_smollm2()
    model.set_attn_implementation(attention.register())
    model, windows = model.to(device), windows.to(device)
    at_once = 1 if device == "cpu" else GPU_WINDOWS
    rules = [DENSE, *TASK_RULES]
    observer = MapObserver(rules, SEARCH_POWERS, rows_per_map=12, least_keys=1, statistics=False)
    with attention.using(observer=observer):
        _losses(model, windows[:OBSERVED_WINDOWS], at_once)
    values, draws = {}, {}
    for count, rule in enumerate(rules, 1):
        began = time.monotonic()
        with attention.using(rule):
            losses = _losses(model, windows, at_once)
        values[rule.name] = evaluate.perplexity(np.concatenate(losses))
        draws[rule.name] = _drawn_perplexities(losses)
        _say(f"  {rule.name}: perplexity {values[rule.name]:.3f} ({time.monotonic() - began:.1f} s)")
        yield _task_rows("SmolLM2-135M", "WikiText-2", "perplexity", values, draws, rules[:count], observer)


def _spearmans(data: Path, pairs: int) -> tuple[list[dict[str, Any]], int]:
    model, tokenizer = pretrained.load_minilm()
    model.set_attn_implementation(attention.register())
    first, second, gold = stsb_pairs(data, pairs)
    rules = [DENSE, *TASK_RULES]
    observer = MapObserver(rules, SEARCH_POWERS, rows_per_map=4, least_keys=1, statistics=False)
    values, draws = {}, {}
    for rule in rules:
        with attention.using(rule):
            vectors = evaluate.embed(model, tokenizer, first + second).double()
        cosines = (vectors[: len(first)] * vectors[len(first) :]).sum(-1).numpy()
        values[rule.name] = evaluate.spearman(cosines, gold)
        draws[rule.name] = [evaluate.spearman(cosines[chosen], gold[chosen]) for chosen in _resampled(len(gold))]
        _say(f"  {rule.name}: Spearman {values[rule.name]:.4f}")
    with attention.using(observer=observer):
        evaluate.embed(model, tokenizer, (first + second)[::8])
    return _task_rows("MiniLM", "STS-B", "spearman", values, draws, rules, observer), len(gold)


def measure_perplexities(windows: torch.Tensor, out: Path, device: str) -> None:
    """Perplexity of SmolLM2-135M under every rule, with Q^p on (the first of) the same windows."""
    for rows in _perplexities(windows, device):
        result_files.write(
            out / "tasks_smollm2.json",
            rows,
            _versions(),
            torch.cuda.get_device_name() if device == "cuda" else None,
            powers=list(SEARCH_POWERS),
            counts={"WikiText-2": windows.shape[0] * (windows.shape[1] - 1)},
            window=windows.shape[1],
            observed_windows=min(OBSERVED_WINDOWS, len(windows)),
        )


def measure_correlations(data: Path, out: Path, pairs: int) -> None:
    """STS-B correlation of MiniLM under every rule, with Q^p on an eighth of the same sentences."""
    rows, count = _spearmans(data, pairs)
    result_files.write(
        out / "tasks_minilm.json", rows, _versions(), powers=list(SEARCH_POWERS), counts={"STS-B": count}
    )


def measure_tasks(
    data: Path | None, tokens: Path | None, models: Sequence[str], out: Path, windows: int, window: int, pairs: int,
    device: str,
) -> None:  # fmt: skip
    """What every rule costs each of ``models`` at its task; ``tokens``, a file of token ids, stands in for the text."""
    if "smollm2" in models:
        if tokens is None:
            assert data is not None
            _, tokenizer = pretrained.load_smollm2()
            found = torch.stack(wikitext_windows(tokenizer, data, windows * window, window))
        else:
            with np.load(tokens) as stored:
                ids = torch.from_numpy(stored["wikitext2"].astype(np.int64))[: windows * window]
            found = ids[: len(ids) // window * window].view(-1, window)
        measure_perplexities(found, out, device)
    if "minilm" in models:
        assert data is not None
        measure_correlations(data, out, pairs)
