"""Times the fused forward with rest = mean under sliding windows beside rest = drop, in one process.

    python3 -m bench.forward.rest_windows --out bench/results/rest_windows_h200.json
    python3 -m bench.forward.rest_windows --library old=a.so --library new=b.so --only d=128 --windows 101

bf16, n = 4096, 16384 tokens, hidden size 2048, causal: a query sees as many keys as its window has, 0 for all of them.
Bursts as in bench/common/timing.py, all in turn, there and back. tflops is dense-equivalent. before_us is the time from
the beginning of the first kernel that writes means of V to the end of the last one, and kernels_us each one's, by the
profiler, calls one by one: a kernel that starts early waits for the one before. Ratios above 1 are faster: beside drop,
and where there are several libraries (the target dspattn_bench_shim of several trees), beside the first.
"""

import argparse
import re
import statistics
import sys
import types

from bench.common import results
from bench.forward import rest

N = 4096
WINDOWS = (101, 254, 256, 1024, 0)
PROFILED = 12  # calls


def cells(windows, only):
    """(window, d) that are asked for."""
    dims = only.get("d", ",".join(map(str, rest.DIMS))).split(",")
    return [(window, d) for window in windows for d in rest.DIMS if str(d) in dims]


def seen_keys(n, window):
    """Pairs of a query and a key that it sees."""
    width = min(window or n, n)
    return width * (width + 1) // 2 + (n - width) * width


def means_kernel(name):
    """Short name of a kernel that writes means of V; None of another."""
    found = re.match(r"^(?:void )?dspattn::cuda::blocks::(?:\(.*?\)::)?(\w*(?:means|sum_blocks)\w*)\b", name)
    return found[1] if found else None


def before_forward(kernels):
    """(before_us, {kernel: us}) of one call's kernels, [(name, begin, end)] in us."""
    means = [(short, begin, end) for name, begin, end in kernels if (short := means_kernel(name))]
    if not means:
        return 0.0, {}
    before = max(end for _, _, end in means) - min(begin for _, begin, _ in means)
    return before, {short: end - begin for short, begin, end in means}


def medians(found):
    """The same of several calls."""
    names = found[0][1]
    return {
        "before_us": round(statistics.median(before for before, _ in found), 1),
        "kernels_us": {name: round(statistics.median(us[name] for _, us in found), 1) for name in names},
    }


def rows_of(cell, patterns, libraries, timed, profiled):
    """Rows of a cell from {(pattern, rest, library): figures}, and what runs before the mean's."""
    window, d = cell
    rows = []
    for pattern in patterns:
        for kind in rest.RESTS:
            for library in libraries:
                key = pattern, kind, library
                beside = {"drop": (pattern, "drop", library)} if kind == "mean" else {}
                if library != libraries[0]:
                    beside[libraries[0]] = pattern, kind, libraries[0]
                ratio = {
                    name: round(timed[other]["median_us"] / timed[key]["median_us"], 3)
                    for name, other in beside.items()
                }
                place = {"n": N, "d": d, "mask": "causal", "window": window, "pattern": pattern, "rest": kind}
                named = {"library": library} if library else {}
                rows.append({**place, **named, **timed[key], **profiled.get(key, {}), "ratio": ratio})
    return rows


def line_of(row):
    window = f"window {row['window']:4}" if row["window"] else "no window  "
    ratios = ", ".join(f"{value:.3f} of {name}" for name, value in row["ratio"].items())
    kernels = " ".join(f"{name} {us}" for name, us in row.get("kernels_us", {}).items())
    before = f"  {row['before_us']} us before ({kernels})" if kernels else ""
    return (
        f"{row['pattern']} d {row['d']:3} {window} {row['rest']} {row.get('library', '')}  {row['median_us']:8.1f} us  "
        f"{ratios}{before}"
    )


def profile(calls):
    """What runs before the forward of some calls that do the same on copies of their inputs."""
    import torch
    from torch.profiler import ProfilerActivity

    found = []
    for i in range(PROFILED):
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
            calls[i % len(calls)]()
            torch.cuda.synchronize()
        kernels = [(event.name, event.time_range.start, event.time_range.end) for event in profiler.events()]
        if i >= 2:
            found.append(before_forward(kernels))
    return medians(found)


def measure(bench, place, patterns, libraries):
    """Rows of one cell. libraries: {label: path}."""
    from bench.common import native, timing
    from bench.forward import measure as forward

    window, d = place
    cell = forward.Cell(N, d, mask="causal")
    flop = 4 * cell.batch * cell.heads * d * seen_keys(N, window)
    graphs, profiled = {}, {}
    for pattern in patterns:
        for kind in rest.RESTS:
            for label, path in libraries.items():
                options = {"pattern": forward.PATTERNS[pattern], "causal": True, "rest": kind, "path": path}
                options["window"] = (window - 1, 0) if window else (-1, -1)
                calls = [native.prepare(*qkv, **options)[0] for qkv in cell.sets]
                graphs[pattern, kind, label] = timing.Graphed(calls)
                if kind == "mean":
                    profiled[pattern, kind, label] = profile(calls)
    timed = {key: modes["burst"] for key, modes in bench.time_in_turn(graphs, flop).items()}
    return rows_of(place, patterns, list(libraries), timed, profiled)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON to write, anew after every cell")
    parser.add_argument("--windows", nargs="+", type=int, default=list(WINDOWS), metavar="KEYS")
    parser.add_argument("--only", nargs="*", default=[], metavar="KEY=VALUES", help="d, pattern")
    parser.add_argument("--library", action="append", default=[], metavar="LABEL=PATH", help="a build; may be repeated")
    parser.add_argument("--idle", type=float, default=0.3, help="seconds of pause before a burst")
    arguments = parser.parse_args(argv)
    only = dict(entry.split("=", 1) for entry in arguments.only)
    if unknown := set(only) - {"d", "pattern"}:
        parser.error(f"--only: expected d or pattern, got {', '.join(unknown)}")
    patterns = [pattern for pattern in rest.PATTERNS if pattern in only.get("pattern", "2:4").split(",")]

    from bench.common import timing
    from bench.forward import measure as forward

    bench = forward.Bench(
        types.SimpleNamespace(library=arguments.library, idle=arguments.idle, peers=[], only=[], seconds=1e9)
    )
    facts = results.gpu() if arguments.out else None
    timing.warm_up()
    rows = []
    for place in cells(arguments.windows, only):
        added = measure(bench, place, patterns, bench.libraries)
        rows += added
        print("\n".join(map(line_of, added)), flush=True)
        if arguments.out:
            results.write(arguments.out, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
