"""Timing, alike for everything that is compared.

Graphed: GPU work is captured into one CUDA graph that repeats it until it lasts about half a millisecond, going through
all copies of its inputs in turn, so that neither launches nor a warm L2 cache count. Burst: on a card that has worked
before (warm_up), a pause, 5 warm-up graphs, then 30 that count. Sustained: graphs for at least a second without a
pause, of which the second half counts: a card under its power cap has clocked down by then. In turn: one call of each
after the other, so that all share the state of the machine; on a GPU each with a flushed cache.
"""

import ctypes
import itertools
import statistics
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


CLOCK = Clock()


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
        # The graph reads and writes what the calls hold. Without them that memory would be given back, and the next
        # capture, which empties torch's cache, would unmap it.
        self.calls = calls
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
        self.calls = calls  # and the memory that the graph uses: the next capture would unmap it
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
    clock, power = CLOCK.mhz(), CLOCK.watts()
    torch.cuda.synchronize()
    times = [1e3 * before.elapsed_time(after) / graphed.launches for before, after in itertools.pairwise(events)]
    return {**summary(times[count // 2 :]), "sm_clock_mhz": clock, "watts": power}


def summary(times):
    """Median, and 90th less 10th percentile."""
    ordered = sorted(times)
    return {
        "median_us": round(statistics.median(ordered), 2),
        "spread_us": round(ordered[int(0.9 * len(ordered))] - ordered[int(0.1 * len(ordered))], 2),
    }


def _event_us(function):
    """Microseconds of one call, by events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


def in_turn(functions, repeats):
    """{name: summary} of functions on the GPU, called in turn. Before each a large buffer is read and written: none
    finds its inputs in the cache."""
    flush = torch.zeros(1 << 26, device="cuda")  # 256 MiB: several times any L2
    times = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    for _ in range(repeats):
        for name, function in functions.items():
            flush.add_(1)
            times[name].append(_event_us(function))
    return {name: summary(values) for name, values in times.items()}


CPU_CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
FEWEST_ROUNDS = 7


def in_turn_on_cpu(functions, seconds, clock):
    """{name: summary} of functions on the CPU, called in turn for about `seconds`."""
    now = CPU_CLOCKS[clock]
    times = {name: [] for name in functions}
    for function in functions.values():
        function()
    end, rounds = now() + seconds, 0
    while rounds < FEWEST_ROUNDS or now() < end:
        for name, function in functions.items():
            start = now()
            function()
            times[name].append(1e6 * (now() - start))
        rounds += 1
    return {name: summary(values) for name, values in times.items()}
