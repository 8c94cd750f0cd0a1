"""Time, stages and memory of a call, and the JSON that a measurement is written to. Runs on the CPU and on a GPU."""

from __future__ import annotations

import datetime
import gc
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dspattn import zoo

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
Run = Callable[[], Any]


NO_TIME = "no time left (--budget-seconds)"


class NoTimeError(RuntimeError):
    """The figure's share of the run is spent."""


class Clock:
    """Times calls on one device: CUDA events on a GPU, the processor's clock on the CPU.

    ``case_seconds`` bounds the calls of one case, of which there are then fewer; after ``until`` (time.monotonic) no
    case begins.
    """

    def __init__(self, device: str, repeats: int, warmup: int = 3, case_seconds: float = float("inf")) -> None:
        self.cuda = device == "cuda"
        self.repeats, self.warmup, self.case_seconds = repeats, warmup, case_seconds
        self.until = float("inf")

    def check_time(self) -> None:
        if time.monotonic() > self.until:
            raise NoTimeError(NO_TIME)

    def _warmed(self, run: Run) -> int:
        """Warms up, and how many calls fit into a case's time, three at least."""
        begun = time.monotonic()
        seconds = 0.0
        for _ in range(self.warmup):
            before = time.monotonic()
            run()
            if self.cuda:
                torch.cuda.synchronize()
            seconds = time.monotonic() - before
            if time.monotonic() - begun > self.case_seconds:
                break
        if seconds * self.repeats <= self.case_seconds:
            return self.repeats
        return min(self.repeats, max(3, int(self.case_seconds / seconds)))

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, second: Any) -> float:
        """Microseconds."""
        return 1e3 * first.elapsed_time(second) if self.cuda else 1e6 * (second - first)

    def times(self, run: Run) -> dict[str, float]:
        """Median and spread (p90 - p10) of a call."""
        return self.in_turn({"it": run})["it"]

    def in_turn(self, runs: dict[str, Run]) -> dict[str, dict[str, float]]:
        """The same of several, one call of each after the other, so that they share the state of the machine; in a new
        order each time, since what ran before decides the clock that a GPU near its power limit allows."""
        rounds = min(self._warmed(run) for run in runs.values()) if runs else 0
        marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in runs}
        order = list(runs)
        shuffled = random.Random(0)
        for _ in range(rounds):
            shuffled.shuffle(order)
            for name in order:
                first = self._mark()
                runs[name]()
                marks[name].append((first, self._mark()))
        if self.cuda:
            torch.cuda.synchronize()
        found: dict[str, dict[str, float]] = {}
        for name, pairs in marks.items():
            ordered = sorted(self._between(*pair) for pair in pairs)
            tenth = len(ordered) // 10
            found[name] = {
                "median_us": round(statistics.median(ordered), 2),
                "spread_us": round(ordered[-1 - tenth] - ordered[tenth], 2),
                "calls": len(ordered),
            }
        return found

    def stages(self, run: Run) -> dict[str, float]:
        """Microseconds of each stage that the mechanism names, and of what is left: medians over single calls."""
        whole: list[dict[str, float]] = []
        ends = time.monotonic() + self.case_seconds
        for _ in range(min(self.repeats, 20 if self.case_seconds == float("inf") else 5)):
            if whole and time.monotonic() > ends:
                break
            marks: list[tuple[str, Any, Any]] = []
            with observed(self, marks):
                first = self._mark()
                run()
                last = self._mark()
            if self.cuda:
                torch.cuda.synchronize()
            one = {"scores": 0.0, "softmax": 0.0, "product": 0.0}
            for stage, begin, end in marks:
                one[stage] += self._between(begin, end)
            one["overhead"] = max(0.0, self._between(first, last) - sum(one.values()))
            whole.append(one)
        return {stage: round(statistics.median(one[stage] for one in whole), 2) for stage in whole[0]}

    def peak_bytes(self, run: Run) -> int:
        """The most memory that a call holds beyond what was there before it."""
        if not self.cuda:
            return live_bytes(run)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = run()
        torch.cuda.synchronize()
        del kept
        return int(torch.cuda.max_memory_allocated() - before)


@contextmanager
def observed(clock: Clock, marks: list[tuple[str, Any, Any]]) -> Iterator[None]:
    """Within the block, every stage of the zoo adds (stage, begin, end) to ``marks``."""

    @contextmanager
    def around(stage: str) -> Iterator[None]:
        begin = clock._mark()
        yield
        marks.append((stage, begin, clock._mark()))

    before = zoo.Stages.observe
    zoo.Stages.observe = staticmethod(around)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        zoo.Stages.observe = before  # type: ignore[method-assign]


def live_bytes(run: Run) -> int:
    """Peak of the bytes of tensors alive at once, as PyTorch's CPU allocator saw them; memory that an operator takes
    and gives back inside itself counts too."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    now = peak = 0
    for event in sorted(
        (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    ):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def _said(*command: str) -> str:
    """What a command prints; nothing where it fails or is not there."""
    try:
        return subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def revision() -> str:
    """The commit measured, -dirty when its code has uncommitted changes; results and documents are not code. Outside a
    checkout DSPATTN_COMMIT names it."""
    if named := os.environ.get("DSPATTN_COMMIT"):
        return named
    found = _said("git", "rev-parse", "--short=12", "HEAD") or "unknown"
    changed = _said(
        "git", "status", "--porcelain", "--", ":/", ":(top,exclude)experiments/*/results/*", ":(top,exclude)docs"
    )
    return found + ("-dirty" if changed else "")


REVISION = revision()  # of the code that was loaded, whatever is checked out while it runs


def machine(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"name": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    about: dict[str, Any] = {"name": torch.cuda.get_device_name(), "cores": os.cpu_count()}
    asked = _said("nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.max.sm", "--format=csv,noheader,nounits")
    if asked:
        driver, *clocks = (part.strip() for part in asked.splitlines()[0].split(","))
        # Where a clock cannot be read, nvidia-smi says so in words.
        clock, most = (int(word) if word.isdigit() else None for word in clocks)
        about |= {"driver": driver, "sm_clock_mhz": clock, "sm_clock_max_mhz": most}
    return about


def write(name: str, device: str, rows: list[dict[str, Any]]) -> Path | None:
    """results/<name>_<machine>.json, in the shape of all committed measurements. Cases that had no time are no rows:
    they are named under left_out. None, and no file, where there was time for nothing."""
    unmeasured = [row for row in rows if row.get("skipped") == NO_TIME]
    rows = [row for row in rows if row.get("skipped") != NO_TIME]
    if not rows:
        return None
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    label = platform.machine()
    if device == "cuda":
        versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
        label = torch.cuda.get_device_name().split()[-1].lower()
    head = {
        "command": " ".join(["python", "experiments/comparison/run.py", *map(shlex.quote, sys.argv[1:])]),
        "commit": REVISION,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": machine(device),
        "versions": versions,
    }
    if unmeasured:
        named = ("dtype", "n_k", "kernel", "density", "heads", "feed_forward")
        head["left_out"] = [", ".join(f"{key} {row[key]}" for key in named if row.get(key)) for row in unmeasured]
    lines = ",\n    ".join(json.dumps(row) for row in rows)
    path = RESULTS / f"{name}_{label}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n    {lines}\n ]\n}}\n')
    return path


def attempt(what: str, work: Callable[[], dict[str, Any]], clock: Clock) -> dict[str, Any]:
    """The measured entries, or why there are none: a mechanism that cannot run a case is a result, not a failure."""
    try:
        clock.check_time()
        return work()
    except NoTimeError as error:
        return {"median_us": None, "skipped": str(error)}
    except (RuntimeError, ValueError, NotImplementedError) as error:  # torch's out-of-memory error is a RuntimeError
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    # Behind the handler: until it ends, the error's traceback holds the tensors of the call that failed.
    if clock.cuda:
        torch.cuda.empty_cache()
    print(f"  {what}: skipped ({reason})", file=sys.stderr, flush=True)
    return {"median_us": None, "skipped": reason}
