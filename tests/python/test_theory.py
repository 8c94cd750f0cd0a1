"""Rules against plain loops, observers against the definition, the search for p, result files, pictures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.theory import correlation, measured_times, result_files
from experiments.theory.maps import LAGS, MapObserver
from experiments.theory.rules import DENSE, Rule, at_density, kept_keys, nm
from experiments.theory.search import disorder, inversions, isotonic, search_power

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "theory" / "results"
INF = float("inf")


def causal_scores(length: int, heads: int = 2, seed: int = 0) -> torch.Tensor:
    scores = torch.randn(heads, length, length, generator=torch.Generator().manual_seed(seed))
    return scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -INF)


def groups_of(rule: Rule, keys: int) -> list[list[int]]:
    if rule.grouping == "consecutive":
        return [list(range(start, min(start + rule.group, keys))) for start in range(0, keys, rule.group)]
    if rule.grouping == "row":
        stride = -(-keys // rule.group)
        return [list(range(start, keys, stride)) for start in range(stride)]
    stride = 128 // rule.group
    return [
        [key for key in range(block + r, block + 128, stride) if key < keys]
        for block in range(0, keys, 128)
        for r in range(stride)
    ]


@pytest.mark.parametrize("grouping", ["consecutive", "interleaved", "row"])
@pytest.mark.parametrize("keep, group", [(1, 2), (2, 4), (4, 8)])
def test_nm_keeps_the_largest_of_every_group(keep, group, grouping):
    rule = nm(keep, group, grouping)
    scores = causal_scores(150)
    scores = (scores * 2).round()  # ties
    kept = kept_keys(scores, rule)
    for row in (0, 1, 63, 127, 128, 149):
        values = scores[1, row].tolist()
        expected = set()
        # The row grouping spreads the row's own keys; the others divide the whole sequence.
        for members in groups_of(rule, row + 1 if grouping == "row" else 150):
            ranked = sorted(members, key=lambda key: (-values[key], key))
            expected |= {key for key in ranked[:keep] if values[key] > -INF}
        assert set(kept[1, row].nonzero().flatten().tolist()) == expected


def test_padded_batches_get_their_own_lengths():
    scores = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    scores[1, :, :, 4:] = -INF
    for rule in (nm(1, 2, "row"), at_density("topk", 0.5), at_density("window", 0.5, per_row=False)):
        together = kept_keys(scores, rule)
        alone = kept_keys(scores[1:, :, :4, :4], rule)
        assert torch.equal(together[1:, :, :4, :4], alone)
        assert not together[1, :, :, 4:].any()


@pytest.mark.parametrize("kind", ["topk", "window", "strided", "truncated"])
def test_densities_are_met(kind):
    kept = kept_keys(causal_scores(200), at_density(kind, 0.25))
    for row in (39, 99, 199):
        assert kept[0, row].sum() == round(0.25 * (row + 1))


def test_topk_keeps_the_largest_and_fixed_rules_see_no_score():
    scores = causal_scores(64)
    kept = kept_keys(scores, at_density("topk", 0.25))[0, 63]
    assert scores[0, 63][kept].min() > scores[0, 63][~kept].max()
    for kind in ("window", "strided", "truncated"):
        rule = at_density(kind, 0.5)
        assert torch.equal(kept_keys(scores, rule), kept_keys(causal_scores(64, seed=9), rule))
    window = kept_keys(scores, at_density("window", 0.5))[0, 63]
    assert window[0] and window[33:].all() and not window[1:33].any()


def test_rules_refuse_nonsense():
    with pytest.raises(ValueError, match="keep: expected 1 <= keep <= group = 4, got 5"):
        nm(5, 4, "consecutive")
    with pytest.raises(ValueError, match="divisor of 128"):
        nm(1, 3, "interleaved")
    with pytest.raises(ValueError, match=r"density: expected in \(0, 1\], got 0"):
        at_density("topk", 0)


def test_observer_measures_the_definition():
    scores = causal_scores(256, heads=3).unsqueeze(0) * 2
    rules = [DENSE, nm(2, 4, "consecutive"), at_density("topk", 0.1)]
    observer = MapObserver(rules, [1.0, 3.0], rows_per_map=5, least_keys=100, keys_multiple_of=128)
    observer(0, scores, scores.softmax(-1))
    records = observer.head_rows("model")
    assert [r["head"] for r in records] == [0, 1, 2] and records[0]["rows"] == 2  # the rows of 128 and 256 keys
    rows = scores[0, 1, [127, 255]].double().softmax(-1)
    for rule in rules:
        kept = kept_keys(scores[0], rule)[1, [127, 255]]
        for index, p in enumerate((1.0, 3.0)):
            expected = ((rows**p * kept).sum(-1) / (rows**p).sum(-1)).mean().item()
            assert records[1]["quality"][rule.name][index] == pytest.approx(expected, abs=2e-5)
    assert observer.mean_density()["dense"] == 1.0
    deviations = [scores[0, 1, n - 1, 1:n].double().var(unbiased=False).item() for n in (128, 256)]
    assert records[1]["sigma"] == pytest.approx(np.sqrt(np.mean(deviations)), abs=1e-4)


def test_observer_finds_the_correlation_it_is_given():
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(1, 1, 64, 2048 + 200, generator=generator)
    smooth = torch.nn.functional.avg_pool1d(noise[0], 4, 1).unsqueeze(0)[..., :2048]  # rho(lag) = 1 - lag/4
    observer = MapObserver([DENSE], [1.0], rows_per_map=64, least_keys=1)
    observer(0, smooth * 6, smooth)
    rho = observer.head_rows("model")[0]["rho"]
    # 64 rows of 2048 keys, about four keys a degree of freedom: a deviation of about 1/sqrt(32768).
    assert [rho[str(lag)] for lag in (1, 2, 3)] == pytest.approx([0.75, 0.5, 0.25], abs=0.03)
    assert abs(rho["16"]) < 0.03
    assert set(rho) == {str(lag) for lag in LAGS}


def test_isotonic_is_the_nearest_increasing_sequence():
    values = np.array([3.0, 1.0, 2.0, 5.0, 4.0])
    assert isotonic(values).tolist() == [2.0, 2.0, 2.0, 4.5, 4.5]
    assert disorder(np.arange(5.0), np.arange(5.0) ** 2) == 0
    assert disorder(np.arange(5.0), -np.arange(5.0)) == pytest.approx(1)
    assert inversions(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0])) == 1


def test_search_finds_the_power_that_orders_the_anchors():
    rows = np.random.default_rng(0).dirichlet(np.full(16, 0.3), 30)
    kept = np.random.default_rng(1).random((30, 16)) < 0.5
    powers = np.arange(0.5, 6.01, 0.5)
    quality = np.array(
        [[(row[k] ** p).sum() / (row**p).sum() for p in powers] for row, k in zip(rows, kept, strict=True)]
    )
    goodness = np.sqrt(quality[:, 5])  # p = 3 decides
    anchor = np.arange(30) < 20
    found = search_power(powers, quality, goodness, anchor)
    assert found.curve[5] == 0 and found.anchors == 0  # p = 3 is among the perfect powers
    assert abs(found.best - 3.0) <= 0.5 and found.everything < 1e-3
    assert found.curve[0] > 0.1


def test_mixtures_stay_valid_correlations():
    lags = [1, 2, 3, 8, 32, 64]
    fit = correlation.fit_mixture(lags, [0.9, 0.7, 0.6, 0.4, -0.1, -0.2])  # no mixture goes negative
    assert all(weight > 0 for weight, _ in fit) and sum(weight for weight, _ in fit) <= 1 + 1e-9
    good = 0.3 * 0.5 ** np.array(lags) + 0.4 * 0.97 ** np.array(lags)
    again = correlation.evaluate(correlation.fit_mixture(lags, good), np.array(lags, dtype=float))
    assert again == pytest.approx(good, abs=2e-3)


def test_result_files_round_trip_and_refuse_what_they_are_not(tmp_path):
    path = tmp_path / "sub" / "x.json"
    result_files.write(path, [{"a": 1}, {"a": 2}], {"torch": "2"}, powers=[1.0])
    content = result_files.read(path)
    assert content["rows"] == [{"a": 1}, {"a": 2}] and content["powers"] == [1.0]
    assert {"command", "commit", "date", "device", "versions"} <= set(content)
    with pytest.raises(FileNotFoundError, match="no such result file"):
        result_files.read(tmp_path / "absent.json")
    path.write_text("[1]")
    with pytest.raises(ValueError, match="rows"):
        result_files.read(path)


def bench_rows() -> list[dict]:
    row = {
        "pattern": "2:4",
        "pass": "forward",
        "mask": "full",
        "dtype": "bf16",
        "n_k": 1024,
        "d": 64,
        "median_us": 50.0,
    }
    return [
        row | {"peers": {"unfused": {"median_us": 100.0}}, "stage": "chain"},
        row | {"n_k": 512, "peers": {"unfused": {"median_us": 60.0}}},
        row | {"n_k": 2048, "peers": {"unfused": None}},
        row | {"n_k": 4096, "median_us": None, "peers": {"unfused": {"peak_bytes": 5}}},
        row | {"pattern": "dense", "peers": {"unfused": {"median_us": 1.0}}},
        row | {"stage": "softmax", "peers": {"unfused": {"median_us": 80.0}}},
        row | {"stage": "softmax", "dtype": "fp32", "peers": {"unfused": {"median_us": 60.0}}},
        row | {"mask": "causal", "peers": {"unfused": {"median_us": 1.0}}},
    ]


def test_measured_times_become_speedups(tmp_path):
    assert measured_times.read_measured(tmp_path) == [] and measured_times.read_stages(tmp_path) == {}
    (tmp_path / "pipeline_h200.json").write_text(json.dumps({"rows": bench_rows()}))
    (series,) = measured_times.read_measured(tmp_path)
    assert series.keys == [512, 1024] and series.speedups == [1.2, 2.0]
    assert series.label == "pipeline 2:4 bf16 measured, d = 64"
    assert measured_times.read_stages(tmp_path) == {
        ("2:4", "bf16", 1024, 64): {"softmax": 1.6},
        ("2:4", "fp32", 1024, 64): {"softmax": 1.2},  # another type does not take the place of the first
    }


@pytest.mark.long
def test_pictures_redraw_from_the_committed_files_alone(tmp_path):
    pytest.importorskip("matplotlib")
    from experiments.theory import pictures

    paths = pictures.draw_all(RESULTS, tmp_path, tmp_path / "no bench")
    assert len(paths) == 11
    assert all(path.stat().st_size > 10_000 for path in paths)


def test_the_speed_picture_gains_a_panel_with_measured_stages(tmp_path):
    pytest.importorskip("matplotlib")
    from experiments.theory import pictures

    (tmp_path / "pipeline_h200.json").write_text(json.dumps({"rows": bench_rows()}))
    rows = result_files.read(RESULTS / "theory.json")["rows"]
    with_times = pictures.speedups(rows, measured_times.read_measured(tmp_path), measured_times.read_stages(tmp_path))
    without = pictures.speedups(rows, [], {})
    assert len(with_times.axes) == 3 and len(without.axes) == 2
    with_times.savefig(tmp_path / "speedups.png")


def test_the_page_says_what_the_results_say():
    command = [sys.executable, "-m", "experiments.theory.tables", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
