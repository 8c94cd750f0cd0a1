"""Writes the tables of docs/models.md about Flux with norm_rope from bench/results/flux_norm_rope_h200.json, between
their markers.

python3 -m bench.clients.flux_table            # rewrite
python3 -m bench.clients.flux_table --check    # exit 1 when a table is not what the results say
"""

import re
import sys

from bench.common import pages

CONTENDERS = {"stock": "stock", "norm_rope": "`fuse_norm_rope` alone", "1:2": "1:2 alone", "1:2, norm_rope": "both"}
FORMS = {"plain": "as it is", "compiled": "compiled", "graph": "compiled, one product for q, k, v, in a CUDA graph"}
KERNELS = {
    "attention": re.compile("sdpa|fused_forward"),
    "matrix products": re.compile("nvjet|cublas"),
    "`norm_rope`": re.compile("norm_rope_kernel"),
}
REST = "all else"


def times(result):
    """Milliseconds of a forward pass, and how many times as fast as stock."""
    lines = [f"| {' | '.join(['', *CONTENDERS.values()])} |", "|---" * (len(CONTENDERS) + 1) + "|"]
    for row in result["rows"]:
        cells = [FORMS[row["form"]]]
        for name in CONTENDERS:
            ratio = f", {row['ratios'][name]:.3f}" if name in row["ratios"] else ""
            cells.append(f"{row['times'][name]['median_us'] / 1e3:.1f} ms{ratio}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def kernels(result):
    """Milliseconds of all kernels of one pass, by what they are."""
    lines = [f"| {' | '.join(['', *CONTENDERS.values()])} |", "|---" * (len(CONTENDERS) + 1) + "|"]
    for row in result["rows"]:
        sums = {name: by_kind(row["kernels"][name]) for name in CONTENDERS}
        for kind in [*KERNELS, REST, "together"]:
            cells = [f"{sums[name][kind] / 1e3:.1f}" if sums[name][kind] else "" for name in CONTENDERS]
            lines.append(f"| {row['form'].replace('plain', FORMS['plain'])}: {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_kind(of_one_pass):
    """{kind: microseconds}"""
    sums = dict.fromkeys([*KERNELS, REST, "together"], 0.0)
    for name, _, microseconds in of_one_pass:
        kind = next((kind for kind, pattern in KERNELS.items() if pattern.search(name)), REST)
        # Inductor names a kernel after all that it fuses: what comes before attention among them.
        sums[REST if name.startswith("triton") else kind] += microseconds
        sums["together"] += microseconds
    return sums


RESULT = "flux_norm_rope_h200.json"
TABLES = [
    pages.Table("docs/models.md", "flux", RESULT, times),
    pages.Table("docs/models.md", "flux kernels", RESULT, kernels),
]


def main(arguments):
    return pages.run(arguments, "bench.clients.flux_table", *TABLES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
