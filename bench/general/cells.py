"""Which problems the general kernel is timed on, and which ratios it must reach; no GPU and no torch needed."""

TOKENS, HIDDEN = 16384, 2048
# In the order in which they are taken: a run that is cut short has what matters.
LENGTHS = (4096, 1024, 256, 16384, 512, 2048, 8192)
PATTERNS = {"2:4": (2, 4), "1:2": (1, 2), "dense": (1, 1), "1:4": (1, 4)}
FP32_PATTERNS = ("1:2", "2:4", "dense")
# fp32 beside the best of PyTorch's; smaller problems, as bench.forward.fp32 has them.
FP32_BATCH, FP32_HEADS, FP32_LENGTHS = 8, 4, (512, 1024, 2048, 4096)
FP32_DIMS = {"forward": (64, 256), "backward": (64,)}


def cells(passes="forward"):
    """Every problem as a dictionary."""
    sixteen_bit = [
        {"dtype": "bf16", "n": n, "d": d, "mask": mask, "pattern": pattern}
        for n in LENGTHS
        for d in (64, 128)
        for mask in ("full", "causal")
        for pattern in PATTERNS
    ]
    fp32 = [
        {"dtype": "fp32", "n": n, "d": d, "mask": "full", "pattern": pattern}
        for d in FP32_DIMS[passes]
        for n in FP32_LENGTHS
        for pattern in FP32_PATTERNS
    ]
    return sixteen_bit + fp32


def shape(cell):
    """(batch, heads) of a cell."""
    if cell["dtype"] == "fp32":
        return FP32_BATCH, FP32_HEADS
    return max(1, TOKENS // cell["n"]), HIDDEN // cell["d"]


def flop(cell, passes="forward"):
    """Dense-equivalent: 4 batch heads n^2 d, halved when causal; of backward, with five products, 2.5 times that."""
    batch, heads = shape(cell)
    products = 4 * batch * heads * cell["n"] ** 2 * cell["d"] * (0.5 if cell["mask"] == "causal" else 1)
    return products * (2.5 if passes == "backward" else 1)


def bars(cell, passes="forward"):
    """(floor, goal) of the ratio to the fastest peer; a goal that is no higher is none."""
    if passes == "backward":
        return (1.0, 1.0) if cell["dtype"] == "fp32" else (0.85, 1.0)
    if cell["dtype"] == "fp32":
        return 1.2, 1.2
    if cell["pattern"] == "dense":
        return 0.9, 0.9
    if cell["pattern"] == "1:4":
        return 0.5, 0.5
    return (1.05, 1.25) if cell["n"] >= 1024 else (1.0, 1.0)


def verdict(cell, ratio, passes="forward"):
    """BELOW, floor, goal; empty where nothing was measured beside it."""
    if ratio is None:
        return ""
    floor, goal = bars(cell, passes)
    return "BELOW" if ratio < floor else "goal" if ratio >= goal else "floor"


def chosen(only, passes="forward"):
    """The cells that have the given values: {"n": "256,4096", "pattern": "2:4"}."""
    return [cell for cell in cells(passes) if all(str(cell[key]) in values.split(",") for key, values in only.items())]
