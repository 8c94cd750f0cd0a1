"""Worker processes that stay: a group of four, whose first one to four ranks run what a test gives them.

Starting a process with torch costs seconds; here it is paid once for all tests, and forked from one that has imported
everything.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import tempfile
import time
import traceback
from pathlib import Path

WORLD = 4
TIMEOUT = 120.0  # of the process group
PATIENCE = 600.0  # for an answer, on a machine that is busy


def _serve(rank, world, store, seconds, backend, connection):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group(backend, store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timeout)
    groups = {size: dist.new_group(list(range(size))) for size in range(1, world + 1)}
    with contextlib.suppress(EOFError):
        while (job := connection.recv()) is not None:
            number, function, size, arguments = job
            try:
                answer = (number, True, function(groups[size], rank, *arguments))
            except Exception as error:
                answer = (number, False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
            connection.send(answer)


class Failure(str):
    """What a worker raised, as text."""


class Pool:
    def __init__(self, world=WORLD, timeout=TIMEOUT, backend="gloo"):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["parallel_imports"])
        self.jobs = 0
        self.folder = tempfile.TemporaryDirectory()
        self.world, self.timeout = world, timeout
        self.processes, self.connections = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (rank, world, str(Path(self.folder.name) / "store"), timeout, backend, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def run(self, function, *arguments, size=None):
        """function(group, rank, *arguments) on every rank of a group; what each returned, or a Failure."""
        size = self.world if size is None else size
        self.jobs += 1
        for connection in self.connections[:size]:
            connection.send((self.jobs, function, size, arguments))
        results = []
        deadline = time.monotonic() + PATIENCE
        for rank, connection in enumerate(self.connections[:size]):
            results.append(self._answer(rank, connection, deadline))
        return results

    def _answer(self, rank, connection, deadline):
        while connection.poll(max(0.0, deadline - time.monotonic())):
            try:
                number, good, result = connection.recv()
            except EOFError:
                return Failure("died")
            if number == self.jobs:  # not the late answer to a job that was given up
                return result if good else Failure(result)
        raise TimeoutError(f"rank {rank} hangs")

    def close(self):
        for connection in self.connections:
            with contextlib.suppress(BrokenPipeError):
                connection.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.terminate()
        self.folder.cleanup()
