"""What the fused backward is meant to reach, and whether the rows of a result file do.

Ratios are times of the peer, or of what the row was timed beside, over ours. Every bar has a floor, some a goal.
"""

LENGTHS = (512, 1024, 4096, 16384)
MASKS = ("full", "causal")
PATTERNS = ("2:4", "1:2")

# Against cuDNN, 16,384 tokens, hidden size 2048, d 64 and 128: (floor, goal).
BACKWARD = (0.95, 1.08)
BACKWARD_SHORT = (0.9, None)  # n = 512
BOTH = (1.05, 1.15)  # forward and backward
# Of the other parts: what they are compared with, and the floor.
OTHERS = {
    "dims": ("cudnn", 0.9),
    "gqa": ("dense batch", 0.9),
    "mask": ("dense batch", 0.85),
    "varlen": ("dense batch", 0.85),
}


def bar_of(row):
    """(what it is compared with, floor, goal or None) of a row, or None."""
    if row["part"] in OTHERS:
        beside, floor = OTHERS[row["part"]]
        return (beside, floor, None) if row["pass"] == "backward" else None
    if row["part"] != "table":
        return None
    if row["pass"] == "both":
        return ("cudnn", *BOTH) if row["n_q"] >= 1024 else None
    if row["mode"] != "burst":
        return None
    return ("cudnn", *(BACKWARD if row["n_q"] >= 1024 else BACKWARD_SHORT))


def verdict(row):
    """'goal', 'floor', 'BELOW', or '' where there is no bar or nothing to compare with."""
    bar = bar_of(row)
    ratio = row["ratio"].get(bar[0]) if bar else None
    if ratio is None:
        return ""
    _, floor, goal = bar
    if ratio < floor:
        return "BELOW"
    return "goal" if goal is None or ratio >= goal else "floor"


def flop(batch, heads, n, d, causal, passes):
    """Dense-equivalent operations: 4 batch heads n n d, halved when causal, a backward counted as 2.5 forwards."""
    forward = 4 * batch * heads * n * n * d * (0.5 if causal else 1)
    return forward * {"backward": 2.5, "both": 3.5}[passes]
