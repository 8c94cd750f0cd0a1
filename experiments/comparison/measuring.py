"""Time, stages and memory of a call, and the JSON that a measurement is written to. Runs on the CPU and on a GPU."""

from __future__ import annotations

import datetime
import gc
import json
import os
import platform
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


class Clock:
    """Times calls on one device: CUDA events on a GPU, the processor's clock on the CPU."""

    def __init__(self, device: str, repeats: int, warmup: int = 3) -> None:
        self.cuda = device == "cuda"
        self.repeats, self.warmup = repeats, warmup

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
        for _ in range(self.warmup):
            run()
        marks = []
        for _ in range(self.repeats):
            first = self._mark()
            run()
            marks.append((first, self._mark()))
        if self.cuda:
            torch.cuda.synchronize()
        found = sorted(self._between(*pair) for pair in marks)
        tenth = len(found) // 10
        return {
            "median_us": round(statistics.median(found), 2),
            "spread_us": round(found[-1 - tenth] - found[tenth], 2),
        }

    def stages(self, run: Run) -> dict[str, float]:
        """Microseconds of each stage that the mechanism names, and of what is left: medians over single calls."""
        whole: list[dict[str, float]] = []
        for _ in range(min(self.repeats, 20)):
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


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def revision() -> str:
    """The commit measured, -dirty when its code has uncommitted changes; results and documents are not code."""
    found = _git("rev-parse", "--short=12", "HEAD") or "unknown"
    changed = _git("status", "--porcelain", "--", ":/", ":(top,exclude)experiments/*/results/*", ":(top,exclude)docs")
    return found + ("-dirty" if changed else "")


REVISION = revision()  # of the code that was loaded, whatever is checked out while it runs


def machine(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"name": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    about: dict[str, Any] = {"name": torch.cuda.get_device_name(), "cores": os.cpu_count()}
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.max.sm", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if asked.returncode == 0:
        driver, clock, most = (part.strip() for part in asked.stdout.splitlines()[0].split(","))
        about |= {"driver": driver, "sm_clock_mhz": int(clock), "sm_clock_max_mhz": int(most)}
    return about


def write(name: str, device: str, rows: list[dict[str, Any]]) -> Path:
    """results/<name>_<machine>.json, in the shape of all committed measurements."""
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
    lines = ",\n    ".join(json.dumps(row) for row in rows)
    path = RESULTS / f"{name}_{label}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n    {lines}\n ]\n}}\n')
    return path


def attempt(what: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The measured entries, or why there are none: a mechanism that cannot run a case is a result, not a failure."""
    try:
        return work()
    except (RuntimeError, ValueError, NotImplementedError) as error:  # torch's out-of-memory error is a RuntimeError
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        print(f"  {what}: skipped ({reason})", file=sys.stderr, flush=True)
        return {"median_us": None, "skipped": reason}
