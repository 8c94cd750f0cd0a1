"""What the fused forward is meant to reach, and whether the rows of a result file do.

Every bar has a floor, and most a goal above it. A bar without rows in the file is reported as not measured.
"""

PATTERNS = ("2:4", "1:2")
LENGTHS = (256, 512, 1024, 4096, 16384)
MASKS = ("full", "causal")

# Bursts, bf16, 16,384 tokens, hidden size 2048: times faster than cuDNN, (floor, goal), in the order
# (2:4, d 64), (2:4, d 128), (1:2, d 64), (1:2, d 128).
_TABLE = {
    (256, "full"): ((1.0, 1.1), (1.05, 1.15), (1.0, 1.15), (1.05, 1.15)),
    (256, "causal"): ((1.0, 1.1), (1.0, 1.1), (1.0, 1.15), (1.0, 1.1)),
    (512, "full"): ((1.15, 1.25), (1.15, 1.25), (1.3, 1.4), (1.25, 1.35)),
    (512, "causal"): ((1.1, 1.25), (1.1, 1.25), (1.15, 1.4), (1.15, 1.35)),
    (1024, "full"): ((1.18, 1.35), (1.28, 1.4), (1.35, 1.5), (1.4, 1.5)),
    (1024, "causal"): ((1.15, 1.35), (1.2, 1.4), (1.3, 1.5), (1.3, 1.5)),
    (4096, "full"): ((1.27, 1.48), (1.28, 1.45), (1.54, 1.65), (1.42, 1.55)),
    (4096, "causal"): ((1.22, 1.48), (1.22, 1.45), (1.45, 1.65), (1.35, 1.55)),
    (16384, "full"): ((1.25, 1.48), (1.3, 1.45), (1.5, 1.65), (1.45, 1.55)),
    (16384, "causal"): ((1.25, 1.48), (1.25, 1.45), (1.48, 1.65), (1.4, 1.55)),
}
CELLS = [("2:4", 64), ("2:4", 128), ("1:2", 64), ("1:2", 128)]
SUSTAINED = {"2:4": 1.15, "1:2": 1.25}  # n >= 1024


def table_bar(n, mask, pattern, d):
    """(floor, goal) of a burst cell, or None."""
    cell = _TABLE.get((n, mask))
    return cell[CELLS.index((pattern, d))] if cell and (pattern, d) in CELLS else None


# Of the other parts, the least ratio to what the row was timed beside: 2 % of the interleaved rate, and so on.
_LEAST = {
    "grouping": ("interleaved", 0.98),
    "fp16": ("bf16", 0.95),
    "d256": ("cudnn", 1.2),
    "gqa": ("dense batch", 0.95),
    "varlen": ("dense batch", 0.95),
}


def bar_of(row):
    """(what it is compared with, floor, goal or None) of a row, or None."""
    part, mode = row["part"], row["mode"]
    if part == "table" and mode == "burst":
        bar = table_bar(row["n_q"], row["mask"], row["pattern"], row["d"])
        return ("cudnn", *bar) if bar else None
    if part == "table" and mode == "sustained" and row["n_q"] >= 1024:
        return ("cudnn", SUSTAINED[row["pattern"]], None)
    if part in _LEAST and mode == "burst":
        return (*_LEAST[part], None)
    if part == "mask":
        return ("best", 1.0, None)  # faster than SDPA's best with the same mask
    return None


def verdict(row):
    """'goal', 'floor', 'BELOW', or '' where there is no bar or nothing to compare with."""
    bar = bar_of(row)
    if bar is None:
        return ""
    beside, floor, goal = bar
    # The fastest peer leaves the smallest ratio.
    ratio = min(row["ratio"].values(), default=None) if beside == "best" else row["ratio"].get(beside)
    if ratio is None:
        return ""
    if ratio < floor:
        return "BELOW"
    return "goal" if goal is None or ratio >= goal else "floor"


def counts(rows):
    """How many rows have which verdict; unjudged: a bar, and nothing to compare with."""
    verdicts = [verdict(row) for row in rows]
    found = {name: verdicts.count(name) for name in ("goal", "floor", "BELOW")}
    return found | {"unjudged": sum(bar_of(row) is not None and not verdict(row) for row in rows)}


def all_hold(of):
    """Whether rows with these counts say that every bar that they have holds."""
    return bool(of["goal"] + of["floor"]) and not of["BELOW"] and not of["unjudged"]
