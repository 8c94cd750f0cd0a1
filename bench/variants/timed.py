"""Times builds of the fused forward beside each other and beside cuDNN, for `python3 -m bench.variants`."""

import contextlib
import ctypes
import json
import queue
import subprocess
import sys
import tempfile
import threading

import torch
from torch.nn.attention import sdpa_kernel

from bench.common import native, results, timing
from bench.forward import measure as forward

START_SECONDS = 180  # until a process has torch and the GPU at hand
KILL_SECONDS = 30  # until the driver has let go of a process that hung
PROBE_LAUNCHES = 10  # of every cell: what hangs now and then is likely to do so here


class HungError(Exception):
    pass


class CrashedError(Exception):
    pass


def lines_of(command, first_timeout, timeout):
    """What a process prints, line by line; an error when the next line takes too long or the process ends badly."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=results.ROOT)
        lines = queue.SimpleQueue()

        def read():
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        try:
            limit = first_timeout
            while True:
                try:
                    line = lines.get(timeout=limit)
                except queue.Empty:
                    raise HungError(f"no answer within {limit:g} s") from None
                if line is None:
                    break
                yield line.rstrip("\n")
                limit = timeout
            if code := process.wait():
                errors.seek(0)
                said = errors.read().strip().splitlines()
                raise CrashedError(said[-1][:300] if said else f"ended with status {code}")
        finally:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_SECONDS)


def probe(libraries, places, dtype, grouping):
    """In a process of its own: launches every version on every cell, and prints a line for each that came back."""
    torch.cuda.init()
    torch.cuda.synchronize()
    print("ready", flush=True)
    for name, path in libraries.items():
        for index, place in enumerate(places):
            refused = None
            cell = forward.Cell(place.n, place.d, mask=place.mask, dtype=dtype)
            try:
                for run, _, _ in cell.prepared(path, place.pattern, grouping):
                    for _ in range(PROBE_LAUNCHES):
                        run()
            except RuntimeError as error:  # it says that it does not take this problem
                refused = str(error)
            torch.cuda.synchronize()  # a fault of the kernel ends this process here
            print(json.dumps({"version": name, "cell": index, "refused": refused}), flush=True)
    return 0


def probe_command(libraries, places, dtype, grouping):
    request = {"libraries": libraries, "places": places, "dtype": dtype, "grouping": grouping}
    return [sys.executable, "-m", "bench.variants", "probe", json.dumps(request)]


def probed(libraries, places, command_of, timeout, start_timeout=START_SECONDS):
    """(versions that hang or crash: why, {(version, cell): why} of cells a version does not take).

    One process tries all versions, one after the other; after one that did not come back, another tries the rest.
    """
    left_out, refused = {}, {}
    names = list(libraries)
    while names:
        ready, done = False, 0
        try:
            answers = lines_of(command_of({name: libraries[name] for name in names}), start_timeout, timeout)
            with contextlib.closing(answers):
                for line in answers:
                    if not ready:
                        ready = line == "ready"
                        continue
                    answer = json.loads(line)
                    done += 1
                    if answer["refused"]:
                        refused[answer["version"], places[answer["cell"]]] = answer["refused"]
            return left_out, refused
        except (HungError, CrashedError) as error:
            if not ready:
                raise RuntimeError(f"the process that tries first launches did not start: {error}") from None
            if done == len(names) * len(places):
                return left_out, refused  # all launches came back; only the process did not end well
            index, at = divmod(done, len(places))
            what = "hangs" if isinstance(error, HungError) else "crashes"
            left_out[names[index]] = f"{what} at {places[at]}: {error}"
            names = names[index + 1 :]
    return left_out, refused


def interleaved(contenders, rounds, measure):
    """{name: all times}: the contenders take turns, and in every round the next one begins."""
    names = list(contenders)
    times = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name] += measure(contenders[name])
    return times


def difference(result, expected):
    """None where two tensors are the same bit by bit, else how many elements differ and by how much at most."""
    bits = {2: torch.int16, 4: torch.int32}[result.element_size()]
    differs = result.view(bits) != expected.view(bits)
    if not differs.any():
        return None
    largest = (result[differs].double() - expected[differs].double()).abs().max()  # nan where one is
    return {"elements": int(differs.sum()), "largest": float(largest)}


def compared(results):
    """{version: {"out": difference, "lse": difference, "nan": elements}} of (out, lse) of each, to the first's."""
    first = next(iter(results.values()))
    return {
        name: {
            "out": difference(out, first[0]),
            "lse": difference(lse, first[1]),
            "nan": int(out.isnan().sum() + lse.isnan().sum()),
        }
        for name, (out, lse) in results.items()
    }


def verdict(found):
    """A comparison in words."""
    parts = [f"{name} differs by {found[name]['largest']:.3g}" for name in ("out", "lse") if found[name]]
    if found["nan"]:
        parts.append(f"{found['nan']} NaN")
    return ", ".join(parts) or "identical"


def results_of(prepared):
    """What a version writes for the first copy of the inputs; what it does not write is NaN."""
    run, out, lse = prepared[0]
    out.fill_(torch.nan)
    lse.fill_(torch.nan)
    run()
    torch.cuda.synchronize()
    return out.clone(), lse.clone()


def rows_of(place, facts, flop, times, first, checks):
    """A row a contender. Ratios are of times: above 1 this one is faster."""
    figures = {name: timing.summary(values) for name, values in times.items()}
    rows = []
    for name, found in figures.items():
        ratio = {
            other: round(figures[other]["median_us"] / found["median_us"], 4)
            for other in dict.fromkeys(("cudnn", first))
            if other in figures
        }
        tflops = round(flop / found["median_us"] / 1e6, 1)
        check = {"check": checks[name]} if name in checks else {}
        rows.append(
            {"version": name, "pattern": place.pattern, **facts, **found, "tflops": tflops, "ratio": ratio, **check}
        )
    return rows


def header(first):
    return f"{'cell':22} {'version':12} {'us':>9} {'spread':>7} {'TFLOP/s':>8} {'/cudnn':>7} {'/' + first:>9}"


def line_of(place, row, first):
    ratio = [f"{row['ratio'][name]:.3f}" if name in row["ratio"] else "-" for name in ("cudnn", first)]
    check = f"  {verdict(row['check'])}" if "check" in row else ""
    return (
        f"{place!s:22} {row['version']:12} {row['median_us']:9.2f} {row['spread_us']:7.2f} {row['tflops']:8.1f} "
        f"{ratio[0]:>7} {ratio[1]:>9}{check}"
    )


def build_of(path):
    """What a library says about itself; nothing where it was built otherwise, as bench/CMakeLists.txt does."""
    try:
        function = native.library(path).dspattn_bench_build
    except AttributeError:
        return None
    function.restype = ctypes.c_char_p
    return json.loads(function())


def measure(place, libraries, arguments):
    """Rows of one cell, the versions in their order and cuDNN last."""
    cell = forward.Cell(place.n, place.d, mask=place.mask, dtype=arguments.type)
    prepared = {name: cell.prepared(path, place.pattern, arguments.grouping) for name, path in libraries.items()}
    checks = compared({name: results_of(calls) for name, calls in prepared.items()}) if arguments.check else {}
    contenders = {name: timing.Graphed([run for run, _, _ in calls]) for name, calls in prepared.items()}
    try:
        with sdpa_kernel(forward.PEERS["cudnn"]):
            contenders["cudnn"] = timing.Graphed(cell.peer("cudnn"))
    except RuntimeError as error:
        print(f"{place!s:22} cudnn: {str(error).splitlines()[0][:120]}")
    times = interleaved(contenders, arguments.rounds, lambda graphed: timing.burst_times(graphed, arguments.idle))
    return rows_of(place, cell.facts(), cell.flop, times, next(iter(libraries)), checks)


def run(arguments, libraries, places):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("variants: timing needs a Hopper GPU (compute capability 9.0)", file=sys.stderr)
        return 2
    left_out, refused = probed(
        libraries,
        places,
        lambda some: probe_command(some, places, arguments.type, arguments.grouping),
        arguments.timeout,
    )
    for name, reason in left_out.items():
        print(f"{name}: left out, {reason}", flush=True)
    libraries = {name: path for name, path in libraries.items() if name not in left_out}
    facts = {
        **results.gpu(),
        "builds": {name: build_of(path) for name, path in libraries.items()},
        "grouping": arguments.grouping,
        "rounds": arguments.rounds,
        "idle_s": arguments.idle,
        "left_out": left_out,
    }
    rows, shown = [], None
    for place in places:
        for name in libraries:
            if reason := refused.get((name, place)):
                print(f"{place!s:22} {name}: {'; '.join(reason.splitlines())}", flush=True)
        chosen = {name: path for name, path in libraries.items() if (name, place) not in refused}
        if not chosen:
            continue
        found = measure(place, chosen, arguments)
        rows += found
        first = next(iter(chosen))
        if shown != first:
            print(header(first))
            shown = first
        print("\n".join(line_of(place, row, first) for row in found), flush=True)
        if arguments.out:
            results.write(arguments.out, facts, rows)
        torch.cuda.empty_cache()
    return 1 if left_out or not rows else 0
