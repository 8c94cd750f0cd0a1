"""What ranks send each other: who they are, that they mean the same call, the ring and the exchange of all with all.

Everything is torch.distributed's: point-to-point batches and collectives of the process group given. Where the group
cannot move CUDA tensors (gloo), what travels is staged in host memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import DspattnError

T = TypeVar("T")
# What ranks must have alike; a call that does not have all of it leaves some at None.
FACTS = (
    "call", "cu_seqlens", "dim", "key.shape", "key_lengths", "layout", "masks", "method", "out_dtype", "query.device",
    "query.dtype", "query.shape", "requires_grad", "rule", "value.shape", "x.device", "x.dtype", "x.shape",
)  # fmt: skip
MOST_ROWS = 4  # numbers that a rank tells of itself
MOST_TEXT = 4000  # bytes of a reason that the other ranks are told


class Ranks:
    """A process group as this rank sees it: a ``ProcessGroup``, a ``DeviceMesh`` of one dimension, or None for the
    default group. Without torch.distributed, a group of one."""

    def __init__(self, group: Any = None) -> None:
        if group is None and not (dist.is_available() and dist.is_initialized()):
            self.group: Any = None
            self.rank, self.world = 0, 1
            return
        if hasattr(group, "get_group"):  # a DeviceMesh
            if group.ndim != 1:
                raise DspattnError([f"group: expected a mesh of one dimension (mesh[name]), got {group.ndim}"])
            group = group.get_group()
        self.group = group if group is not None else dist.group.WORLD
        try:
            self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        except Exception as error:  # of many kinds
            expected = "a process group, a DeviceMesh of one dimension or None"
            raise DspattnError([f"group: expected {expected}, got {type(group).__name__} ({error})"]) from None
        if self.rank < 0:
            raise DspattnError(["group: expected a group that this rank is a member of, got one that it is not"])

    def wire(self, like: Tensor) -> torch.device:
        """Where the group takes tensors of this kind from."""
        if like.is_cuda and "nccl" not in str(dist.get_backend_config(self.group)):
            return torch.device("cpu")
        return like.device

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank % self.world)

    def _guarded(self, what: str, action: Callable[[], T]) -> T:
        try:
            return action()
        except DspattnError:
            raise
        except RuntimeError as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DspattnError([f"group: {what} on rank {self.rank} of {self.world} failed: {reason}"]) from error

    def pass_on(self, send: Tensor, receive: Tensor) -> Callable[[], None]:
        """Starts sending to the next rank and receiving from the one before; the result waits for both."""
        operations = []
        if send.numel() > 0:
            operations.append(dist.P2POp(dist.isend, send, self._global(self.rank + 1), self.group))
        if receive.numel() > 0:
            operations.append(dist.P2POp(dist.irecv, receive, self._global(self.rank - 1), self.group))
        what = "passing keys and values around the ring"
        works = self._guarded(what, lambda: dist.batch_isend_irecv(operations)) if operations else []

        def wait() -> None:
            for work in works:
                self._guarded(what, work.wait)

        return wait

    def gather(self, local: Tensor, rows: Sequence[int]) -> list[Tensor]:
        """Every rank's tensor; they differ in their first extent, which is given."""
        if self.world == 1:
            return [local]
        wire = self.wire(local)
        most = max(rows)
        padded = torch.zeros((most, *local.shape[1:]), dtype=local.dtype, device=wire)
        padded[: local.shape[0]] = local
        parts = [torch.empty_like(padded) for _ in rows]
        self._guarded("gathering", lambda: dist.all_gather(parts, padded, self.group))
        return [part[:count].to(local.device) for part, count in zip(parts, rows, strict=True)]

    def add_up(self, local: Tensor) -> None:
        """Replaces a tensor by the sum of every rank's."""
        if self.world > 1:
            travelling = local.to(self.wire(local))
            self._guarded("adding up", lambda: dist.all_reduce(travelling, group=self.group))
            local.copy_(travelling)

    def exchange(self, send: Sequence[Tensor], receive_shapes: Sequence[int]) -> list[Tensor]:
        """Sends tensor p, flat, to rank p; returns what each rank sent here, of the sizes given."""
        if self.world == 1:
            return list(send)
        like = send[0]
        wire = self.wire(like)
        outgoing = torch.cat([part.reshape(-1) for part in send]).to(wire)
        incoming = torch.empty(sum(receive_shapes), dtype=like.dtype, device=wire)
        sizes = [part.numel() for part in send]
        self._guarded(
            "exchanging heads for rows",
            lambda: dist.all_to_all_single(incoming, outgoing, list(receive_shapes), sizes, group=self.group),
        )
        return list(incoming.to(like.device).split(list(receive_shapes)))

    def route(self, like: Tensor) -> str:
        """The kind of device that tensors of this kind travel on, which ranks must have alike."""
        return like.device.type if self.world == 1 else self.wire(like).type

    def agree(
        self,
        call: str,
        error: Exception | None,
        facts: dict[str, Any],
        rows: Sequence[int] = (),
        device: torch.device | None = None,
    ) -> Tensor:
        """That no rank refuses the call and that all mean the same one; returns ``rows`` of every rank. ``device`` is
        that of this rank's tensors.

        Every rank takes part whatever it found, so that all raise where one does, and none waits for another. All that
        ranks ever compare has one length, so that a rank in another call is told of it too.
        """
        facts = dict.fromkeys(FACTS) | {"call": call} | facts
        names = sorted(facts)
        assert len(names) == len(FACTS) and len(rows) <= MOST_ROWS, names
        sums = [zlib.crc32(f"{name}={facts[name]}".encode()) for name in names]
        text = _as_text(error)
        numbers = torch.tensor(
            [len(text), *rows, *[-1] * (MOST_ROWS - len(rows)), *sums], dtype=torch.int64, device="cpu"
        )
        if self.world == 1:
            if error is not None:
                raise error
            return numbers[None, 1 : 1 + len(rows)]
        what, place = "comparing the call with the other ranks'", self._meeting(device)
        table = torch.stack(self._from_all(what, numbers.to(place))).cpu()
        if bool(table[:, 0].any()):
            # Again on every rank, since every rank has the table.
            padded = torch.zeros(int(table[:, 0].max()), dtype=torch.uint8, device="cpu")
            padded[: len(text)] = torch.tensor(list(text), dtype=torch.uint8, device="cpu")
            texts = self._from_all(what, padded.to(place))
            if error is not None:
                raise error
            said = [bytes(t[:n].tolist()).decode(errors="replace") for t, n in zip(texts, table[:, 0], strict=True)]
            raise DspattnError(f"rank {rank}: {line}" for rank, words in enumerate(said) for line in words.splitlines())
        reasons = []
        for column, name in enumerate(names, 1 + MOST_ROWS):
            others = [rank for rank in range(self.world) if table[rank, column] != table[0, column]]
            if others:
                given = f"rank {self.rank} has {facts[name]}"
                reasons.append(f"{name}: expected the same on every rank, ranks {others} differ from rank 0; {given}")
        if reasons:
            raise DspattnError(reasons)
        return table[:, 1 : 1 + len(rows)]

    def _meeting(self, device: torch.device | None) -> torch.device:
        """Where ranks compare their calls: on a device that the group decides, whatever a rank was given."""
        pairs = str(dist.get_backend_config(self.group)).split(",")
        if any(pair.startswith("cpu:") for pair in pairs):
            return torch.device("cpu")
        if device is not None and device.type == "cuda":
            return device
        return torch.device("cuda", torch.cuda.current_device())

    def _from_all(self, what: str, mine: Tensor) -> list[Tensor]:
        every = [torch.empty_like(mine) for _ in range(self.world)]
        self._guarded(what, lambda: dist.all_gather(every, mine, self.group))
        return every


def _as_text(error: Exception | None) -> bytes:
    """What the other ranks are told of an error; empty where there is none."""
    if error is None:
        return b""
    text = str(error) if isinstance(error, DspattnError) else f"{type(error).__name__}: {error}"
    return (text or type(error).__name__).encode()[:MOST_TEXT]
