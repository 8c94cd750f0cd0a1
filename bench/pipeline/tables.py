"""Writes the tables of docs/log/pipeline.md, between their markers, from bench/results/pipeline_h200.json,
pipeline_limits_h200.json and pipeline_designs_h200.json.

python3 -m bench.pipeline.tables            # rewrite
python3 -m bench.pipeline.tables --check    # exit 1 when the tables are not what the results say
"""

import sys

from bench.common import pages

STAGES = ("qk_prune", "softmax", "pv_sparse", "chain")
CASES = (("bf16", "2:4"), ("bf16", "1:2"), ("fp32", "1:2"))
NAMED = (("bf16", "2:4"), ("fp32", "1:2"))  # the cases that have bars


def series(rows, dtype, pattern, stage):
    """The rows of a stage by length, without block masks and memory."""
    found = (r for r in rows if (r["dtype"], r["pattern"], r["stage"], r["mask"]) == (dtype, pattern, stage, "full"))
    return {row["n_k"]: row for row in found if "median_us" in row}


def hybrids(rows):
    """The chain under a block mask: {(type, block size): times faster than without one}."""
    return {
        (row["dtype"], int(row["mask"].rsplit(" ", 1)[1])): next(iter(row["ratio"].values()))
        for row in rows
        if row["mask"].startswith("25 % of blocks")
    }


def stage_table(rows):
    lines = [
        "| | n | qk_prune | softmax | pv_sparse | together | pipeline, µs | unfused, µs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for dtype, pattern in CASES:
        stages = {stage: series(rows, dtype, pattern, stage) for stage in STAGES}
        for n, chain in stages["chain"].items():
            cells = (
                f"{stages[stage][n]['ratio']['unfused']:.2f} ({100 * stages[stage][n]['of_copy']:.0f} %)"
                for stage in STAGES[:3]
            )
            lines.append(
                f"| {dtype} {pattern} | {n} | {' | '.join(cells)} | {chain['ratio']['unfused']:.2f} "
                f"| {chain['median_us']:.0f} | {chain['peers']['unfused']['median_us']:.0f} |"
            )
    return lines


def bar_lines(rows):
    """What was aimed at beside what was reached: (text, aim, figures by case)."""

    def ratios(dtype, pattern, stage, least=0):
        return [row["ratio"]["unfused"] for n, row in series(rows, dtype, pattern, stage).items() if n >= least]

    blocks = hybrids(rows)
    bars = [
        ("the three together, at every length", 1.27, lambda *case: min(ratios(*case, "chain"))),
        ("the three together, at best", 1.89, lambda *case: max(ratios(*case, "chain"))),
        ("`qk_prune`, at every length", 1.0, lambda *case: min(ratios(*case, "qk_prune"))),
        ("`qk_prune` where writing dominates, from 1024 keys on", 1.3, lambda *case: min(ratios(*case, "qk_prune", 1024))),  # noqa: E501
        ("`pv_sparse`, from 1024 keys on", 1.5, lambda *case: min(ratios(*case, "pv_sparse", 1024))),
        ("a quarter of the blocks of 64, over all", 2.5, lambda dtype, _: blocks[dtype, 64]),
        ("a quarter of the blocks of 128, over all", 2.5, lambda dtype, _: blocks[dtype, 128]),
    ]  # fmt: skip
    lines = ["| | aim | " + " | ".join(" ".join(case) for case in NAMED) + " |", "|---|---|---|---|"]
    for text, aim, figure in bars:
        figures = (figure(*case) for case in NAMED)
        cells = (f"{value:.2f}{'' if value >= aim else ' (missed)'}" for value in figures)
        lines.append(f"| {text} | {aim:g} | {' | '.join(cells)} |")
    return lines


def measured(result):
    rows = result["rows"]
    memory = next(row for row in rows if "memory_ratio" in row)
    blocks = hybrids(rows)
    return "\n".join(
        [
            f"{result['device']['name']}, 4 heads, d = 64, batch such that batch · heads · n² = 2²⁹ scores (sixteen "
            f"times the L2 cache and more), PyTorch {result['versions']['torch']}, revision {result['commit'][:10]}; "
            f"copy bandwidth in the same run {result['ceilings']['copy_tb_per_s']:.2f} TB/s. Speed over PyTorch's "
            "unfused bmm, softmax, bmm (tf32 allowed), stage by stage and together; in brackets the share of the copy "
            "bandwidth that a stage reaches, counting only the bytes it must move:",
            "",
            *stage_table(rows),
            "",
            "With a quarter of the blocks kept (n = 4096), over the pipeline without a block mask:",
            "",
            "| | blocks of 64 | blocks of 128 |",
            "|---|---|---|",
            *(f"| {dtype} | {blocks[dtype, 64]:.2f} | {blocks[dtype, 128]:.2f} |" for dtype in ("bf16", "fp32")),
            "",
            f"Peak memory at n = {memory['n_k']} ({memory['dtype']}, batch {memory['batch']}), beyond the inputs: "
            f"{memory['memory_ratio']['unfused']:.2f} of the unfused pipeline's.",
            "",
            "What was aimed at, and the figure that decides:",
            "",
            *bar_lines(rows),
        ]
    )


def designs(result):
    """A line per design; every run begins with cuBLAS's products."""
    columns = [(stage, *case) for stage in ("qk_prune", "pv_sparse") for case in NAMED]
    blocked = "25 % of blocks of 64"

    def cells(rows, mask, style=""):
        found = {(row["stage"], row["dtype"], row["pattern"]): row for row in rows if row["mask"] == mask}
        if style:
            found = {key: row["peers"]["cublas"] for key, row in found.items()}
        return [f"{style}{found[column]['median_us']:.0f}{style}" if column in found else "" for column in columns]

    first = result["rows"][0]
    lines = [
        f"{result['device']['name']}, n = {first['n_k']}, 2:4 of bf16 and 1:2 of fp32, µs; every run begins with "
        f'cuBLAS\'s products, timed beside ours. The last columns are the same with {blocked}. A revision "-dirty" had '
        "the change that its line names on top.",
        *(["", result["note"]] if result.get("note") else []),
        "",
        "| design | revision | " + 2 * (" | ".join(f"{stage} {dtype}" for stage, dtype, _ in columns) + " | "),
        "|---" * (2 + 2 * len(columns)) + "|",
    ]
    for run in sorted({row["run"] for row in result["rows"]}):
        rows = [row for row in result["rows"] if row["run"] == run]
        lines.append("| *cuBLAS* | | " + " | ".join(cells(rows, "full", "*")) + " |" + " |" * len(columns))
        for design, revision in dict.fromkeys((row["design"], row["commit"]) for row in rows):
            own = [row for row in rows if row["design"] == design]
            line = " | ".join((design, revision or "", *cells(own, "full"), *cells(own, blocked)))
            lines.append(f"| {line} |")
    return "\n".join(lines)


def limits(result):
    lines = [
        f"What Nsight Compute says of one launch each ({result['device']['name']}, n = {result['rows'][0]['n_k']}, "
        f"batch {result['rows'][0]['batch']}, revision {result['commit']}; busy in per cent of what there is, and "
        "what warps wait for most):",
        "",
        "| | issue slots | ALU | tensor core | L2 | memory | waits |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        busy = row["busy_percent"]
        waits = [name.lower() for name in row["waits_per_issue"]][:3]
        blocks = "" if row["mask"] == "full" else f", {row['mask']}"
        lines.append(
            f"| `{row['stage']}` {row['dtype']}{blocks} | {busy['issue']:.0f} | {busy['alu']:.0f} "
            f"| {busy['tensor']:.0f} | {busy['l2']:.0f} | {busy['dram']:.0f} | {', '.join(waits)} |"
        )
    if result.get("note"):
        lines += ["", result["note"]]
    return "\n".join(lines)


TABLES = (
    pages.Table("docs/log/pipeline.md", "measured", "pipeline_h200.json", measured),
    pages.Table("docs/log/pipeline.md", "limits", "pipeline_limits_h200.json", limits),
    pages.Table("docs/log/pipeline.md", "designs", "pipeline_designs_h200.json", designs),
)


def main(arguments):
    return pages.run(arguments, "bench.pipeline.tables", *TABLES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
