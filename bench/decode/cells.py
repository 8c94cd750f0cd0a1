"""Which problems of few queries are timed, how many bytes each must read, and what it is meant to reach."""

import dataclasses

CARD_BYTES_PER_S = 4.8e12  # the H200's memory, by its data sheet
LARGE = 64e6  # bytes of K and V from which launches and latency no longer count
RATE_FLOOR = 0.85  # of the card's, at large cells


@dataclasses.dataclass(frozen=True)
class Cell:
    part: str
    batch: int
    heads: int
    kv_heads: int
    n_q: int
    n_k: int
    d: int
    choice: str = "each_head"
    lengths: bool = False  # of all keys, given on the device
    page: int = 0  # keys of a page; 0: K and V in one piece

    @property
    def dense_bytes(self):
        """K and V in 16 bits: what a dense kernel reads."""
        return 2 * 2 * self.batch * self.kv_heads * self.n_k * self.d

    @property
    def needed_bytes(self):
        """K, and of V the rows that some head keeps: half where all rows of a key head keep the same."""
        same = self.choice == "shared" and self.n_q == 1
        one = self.heads * self.n_q == self.kv_heads
        return self.dense_bytes * (3 if same or one else 4) // 4

    def facts(self):
        return dataclasses.asdict(self) | {"dtype": "bf16"}

    def bar(self):
        """(floor, goal or None) of the ratio to the fastest dense kernel."""
        if self.part == "small":
            return (1.0, 1.1)
        if self.n_q > 1:
            eight = (self.n_q, self.heads, self.kv_heads, self.batch) == (8, 32, 8, 16)
            return (1.9 if eight else 1.0, None)
        if self.dense_bytes < LARGE:
            return (0.95, None)
        if self.choice == "shared":
            return (1.12, 1.25)
        return (1.15, 1.25) if self.heads == self.kv_heads else (0.97, 1.0)


def cells():
    """Every cell, by part: one, several (queries), shared, lengths, paged, small."""
    found = []
    for d in (128, 64):
        for kv_heads in (32, 8):
            for batch, n_k in ((1, 2048), (1, 8192), (1, 32768), (1, 131072), (16, 8192)):
                found.append(Cell("one", batch, 32, kv_heads, 1, n_k, d))
                if kv_heads == 8:
                    found.append(Cell("shared", batch, 32, 8, 1, n_k, d, choice="shared"))
            for n_q in (2, 4, 8, 16):
                for batch, n_k in ((1, 8192), (16, 8192)):
                    found.append(Cell("several", batch, 32, kv_heads, n_q, n_k, d))
            found.append(Cell("lengths", 16, 32, kv_heads, 1, 8192, d, lengths=True))
            found.append(Cell("paged", 16, 32, kv_heads, 1, 8192, d, lengths=True, page=64))
    found += [Cell("small", 1, 12, 12, n, n, 64) for n in (64, 128, 256, 512, 1024)]
    return found


def verdict(row):
    """'goal', 'floor', 'BELOW' of a row's ratio and, where it counts, of its bytes per second; '' without a peer."""
    if row["best_ratio"] is None or not row["bar"]:
        return ""
    floor, goal = row["bar"]
    slow = row["part"] in ("one", "shared") and row["dense_bytes"] >= LARGE and row["of_card"] < RATE_FLOOR
    if row["best_ratio"] < floor or slow:
        return "BELOW"
    return "goal" if goal is None or row["best_ratio"] >= goal else "floor"


def row_of(cell, pattern, ours, peers, skipped):
    """A row of the result file; `ours` and the peers are summaries of times, or None."""
    ratio = {name: round(found["median_us"] / ours["median_us"], 3) for name, found in peers.items() if found}
    rate = cell.needed_bytes / ours["median_us"] * 1e6
    row = {
        **cell.facts(), "pattern": pattern, "pass": "forward", "mode": "burst", **ours,
        "dense_bytes": cell.dense_bytes, "needed_bytes": cell.needed_bytes,
        "bytes_per_s": round(rate), "of_card": round(rate / CARD_BYTES_PER_S, 3),
        "peers": peers, "ratio": ratio, "skipped": skipped, "best_ratio": min(ratio.values(), default=None),
        "bar": list(cell.bar()),
    }  # fmt: skip
    return row | {"verdict": verdict(row)}
