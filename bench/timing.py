"""Timing of GPU work, alike for everything that is compared.

Work is captured into one CUDA graph that repeats it until it lasts about half a millisecond, going through all copies
of its inputs in turn, so that neither launches nor a warm L2 cache count. Burst: on a card that has worked before
(warm_up), a pause, 5 warm-up graphs, then 30 that count. Sustained: graphs for at least a second without a pause, of
which the second half counts: a card under its power cap has clocked down by then.
"""

import ctypes
import itertools
import os
import subprocess
import time

import torch

L2_BYTES = 60 << 20  # inputs rotate among copies of at least this much together; the H200's L2 cache has 50 MiB
GRAPH_US = 500
WARM_UPS, COUNTED = 5, 30


def rotation(bytes_each):
    """How many copies of inputs of this size exceed the L2 cache."""
    return max(1, -(-L2_BYTES // max(1, bytes_each)))


class Clock:
    """SM clock and power through NVML; None where there is none."""

    def __init__(self):
        try:
            self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
            self.handle = ctypes.c_void_p()
            failed = self.nvml.nvmlInit_v2() or self.nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.handle))
            self.nvml = None if failed else self.nvml
        except OSError:
            self.nvml = None

    def mhz(self):
        value = ctypes.c_uint()
        if self.nvml is None or self.nvml.nvmlDeviceGetClockInfo(self.handle, 1, ctypes.byref(value)):
            return None
        return value.value

    def watts(self):
        value = ctypes.c_uint()
        if self.nvml is None or self.nvml.nvmlDeviceGetPowerUsage(self.handle, ctypes.byref(value)):
            return None
        return round(value.value / 1000)


_clock = Clock()


def warm_up(seconds=5.0):
    """A card that has idled runs everything some 4.5 % faster at first, and not again once it has worked for a few
    seconds, whatever the pauses (seen on an H200, ours and cuDNN alike): what is compared is timed after that."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
        time.sleep(0.02)


class Graphed:
    """Calls captured into one graph; `launches` of them, each input's turn equally often."""

    def __init__(self, calls):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls[:2]:  # the first may compile or choose
                call()
            stream.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            calls[0]()
            end.record()
            stream.synchronize()
        rounds = max(1, min(32, round(GRAPH_US / max(1.0, 1e3 * start.elapsed_time(end)))) // len(calls))
        self.launches = rounds * len(calls)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        torch.cuda.synchronize()

    def times_us(self, count):
        """Microseconds of one call, `count` graphs without a pause."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            self.graph.replay()
            event.record()
        torch.cuda.synchronize()
        return [1e3 * before.elapsed_time(after) / self.launches for before, after in itertools.pairwise(events)]


def burst_times(graphed, idle):
    torch.cuda.synchronize()
    time.sleep(idle)
    graphed.times_us(WARM_UPS)
    return graphed.times_us(COUNTED)


def burst(graphed, idle):
    return summary(burst_times(graphed, idle))


def sustained(graphed, seconds=1.1):
    """The clock is read while the last part runs."""
    expected_us = min(graphed.times_us(5))
    count = max(40, int(seconds * 1e6 / (expected_us * graphed.launches)))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        graphed.graph.replay()
        event.record()
    time.sleep(max(0.0, 0.8 * seconds - (time.perf_counter() - began)))
    clock, power = _clock.mhz(), _clock.watts()
    torch.cuda.synchronize()
    times = [1e3 * before.elapsed_time(after) / graphed.launches for before, after in itertools.pairwise(events)]
    return {**summary(times[count // 2 :]), "sm_clock_mhz": clock, "watts": power}


def summary(times):
    ordered = sorted(times)
    return {
        "median_us": round((ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2, 2),
        "spread_us": round(ordered[int(0.9 * len(ordered))] - ordered[int(0.1 * len(ordered))], 2),
    }


def _output(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def environment():
    """What a committed result says about where it was measured."""
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    compiler = _output("nvcc", "--version").splitlines()
    described = _output("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return {
        "commit": os.environ.get("DSPATTN_COMMIT") or described or "unknown",
        "device": {
            "name": torch.cuda.get_device_name(),
            "sm_clock_mhz": _clock.mhz(),
            "driver": driver[0] if driver else "unknown",
            "cores": os.cpu_count(),
        },
        "versions": {
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "cudnn": str(torch.backends.cudnn.version()),
            "compiler": compiler[-1] if compiler else "unknown",
        },
    }
