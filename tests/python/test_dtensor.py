"""Attention of distributed tensors: every sharding gives what one device gives, and stays sharded where it may.

The devices are simulated in this process, each with its own part of every tensor, so that nothing is started.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dspattn
from dspattn.integrations import dtensor

simulated = pytest.importorskip("torch.distributed._local_tensor")
dist = pytest.importorskip("torch.distributed")
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh  # noqa: E402

DEVICES = 4
OPTIONS: dict[str, Any] = {"pattern": "1:2", "grouping": "consecutive", "is_causal": True, "enable_gqa": True}
R, B, H = Replicate(), Shard(0), Shard(1)


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    if dist.is_initialized():
        pytest.skip("a process group exists already")
    dist.init_process_group("fake", rank=0, world_size=DEVICES)
    yield
    dist.destroy_process_group()


def equal_on_every_device(distributed: DTensor, expected: Tensor) -> None:
    whole = distributed.full_tensor()
    for device in range(DEVICES):
        torch.testing.assert_close(whole._local_tensors[device], expected.detach(), atol=1e-5, rtol=1e-5)


def loss(out: Tensor, lse: Tensor) -> Tensor:
    return out.sin().sum() + lse.sin().sum()


def check(leaves: list[Tensor], placements: list[Any], **masks: tuple[Tensor, list[Any]]) -> tuple[Any, list[Any]]:
    """Compares with one device, forward and backward; the placements of the output and of the three gradients."""
    alone = [t.clone().requires_grad_() for t in leaves]
    wanted = dspattn.attention(*alone, return_lse=True, **{name: mask for name, (mask, _) in masks.items()}, **OPTIONS)
    loss(*wanted).backward()
    with simulated.LocalTensorMode(DEVICES):
        mesh = init_device_mesh("cpu", (2, 2))
        parts = [distribute_tensor(t, mesh, placements).requires_grad_() for t in leaves]
        split = {name: distribute_tensor(mask, mesh, placed) for name, (mask, placed) in masks.items()}
        got = dspattn.attention(*parts, return_lse=True, **split, **OPTIONS)
        loss(*got).backward()
        for distributed, expected in zip(got, wanted, strict=True):
            equal_on_every_device(distributed, expected)
        for part, leaf in zip(parts, alone, strict=True):
            equal_on_every_device(part.grad, leaf.grad)
        return list(got[0].placements), [list(part.grad.placements) for part in parts]


def tensors(batch: int, heads: int, kv_heads: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(batch, h, n, 8) for h, n in ((heads, 6), (kv_heads, 10), (kv_heads, 10))]


@pytest.mark.parametrize("placements", [[B, H], [H, H]], ids=str)
def test_batch_and_heads_stay_sharded(placements: list[Any]) -> None:
    out, gradients = check(tensors(4, 8, 4), placements)
    assert out == placements and gradients == [placements] * 3


@pytest.mark.parametrize("placements", [[B, H], [H, H], [B, B]], ids=str)
def test_gradients_of_a_bias_and_of_sinks_are_sums_over_devices(placements: list[Any]) -> None:
    torch.manual_seed(2)
    leaves = tensors(4, 8, 4)
    extras = {"attn_bias": torch.randn(1, 8, 6, 10), "sinks": torch.randn(8)}
    alone = {name: t.clone().requires_grad_() for name, t in extras.items()}
    loss(*dspattn.attention(*leaves, return_lse=True, **alone, **OPTIONS)).backward()
    with simulated.LocalTensorMode(DEVICES):
        mesh = init_device_mesh("cpu", (2, 2))
        parts = [distribute_tensor(t, mesh, placements) for t in leaves]
        whole = {name: distribute_tensor(t, mesh, [R, R]).requires_grad_() for name, t in extras.items()}
        loss(*dspattn.attention(*parts, return_lse=True, **whole, **OPTIONS)).backward()
        for name, given in whole.items():
            equal_on_every_device(given.grad, alone[name].grad)


def test_dropout_is_that_of_the_whole_batch() -> None:
    leaves = tensors(4, 8, 4)
    torch.manual_seed(3)
    state = torch.randint(-9, 9, (4,), dtype=torch.int32)
    problem = dspattn._schema.ProblemArguments(*leaves, dropout_state=state, keep=1, group=2, dropout=0.3)
    wanted, _ = dspattn._ops.attention(*problem)
    with simulated.LocalTensorMode(DEVICES):
        mesh = init_device_mesh("cpu", (2, 2))
        parts = [distribute_tensor(t, mesh, [B, H]) for t in leaves]
        dtensor.register_if_distributed(DTensor)
        whole = distribute_tensor(state, mesh, [R, R])
        with pytest.raises(dspattn.DspattnError, match="dropout_p"):
            dspattn.attention(*parts, dropout_p=0.3, **OPTIONS)
        equal_on_every_device(
            dspattn._ops.attention(*problem._replace(q=parts[0], k=parts[1], v=parts[2], dropout_state=whole))[0],
            wanted,
        )


def test_masks_are_sharded_with_the_query_or_whole() -> None:
    torch.manual_seed(1)
    given = tensors(4, 8, 4)
    out, _ = check(
        given, [B, H],
        attn_mask=(torch.rand(4, 1, 6, 10) > 0.3, [B, R]),
        attn_bias=(torch.randn(8, 1, 10), [R, R]),
        key_lengths=(torch.tensor([10, 3, 0, 7]), [R, R]),
    )  # fmt: skip
    assert out == [B, H]


def test_heads_that_do_not_divide() -> None:
    out, _ = check(tensors(1, 3, 3), [H, R])  # uneven, but alike for query and key
    assert out == [H, R]
    out, _ = check(tensors(1, 6, 3), [H, H])  # would part query heads from their key head: gathered
    assert out == [R, R]


def test_one_key_head_for_all() -> None:
    q, k, v = tensors(2, 8, 1)
    alone = [t.clone().requires_grad_() for t in (q, k, v)]
    wanted = dspattn.attention(*alone, return_lse=True, **OPTIONS)
    loss(*wanted).backward()
    with simulated.LocalTensorMode(DEVICES):
        mesh = init_device_mesh("cpu", (2, 2))
        parts = [distribute_tensor(t, mesh, p).requires_grad_() for t, p in ((q, [H, H]), (k, [R, R]), (v, [R, R]))]
        got = dspattn.attention(*parts, return_lse=True, **OPTIONS)
        assert list(got[0].placements) == [H, H]
        loss(*got).backward()
        for part, leaf in zip(parts, alone, strict=True):
            equal_on_every_device(part.grad, leaf.grad)


def test_other_shardings_are_gathered() -> None:
    check(tensors(4, 8, 4), [Shard(2), Shard(3)])


def test_calls_of_pytorchs_function_in_a_block() -> None:
    q, k, v = tensors(4, 4, 4)
    wanted = dspattn.attention(q, k, v, pattern="1:2", grouping="consecutive")
    with simulated.LocalTensorMode(DEVICES):
        mesh = init_device_mesh("cpu", (2, 2))
        parts = [distribute_tensor(t, mesh, [B, H]) for t in (q, k, v)]
        with dspattn.use("1:2", "consecutive"):
            out = torch.nn.functional.scaled_dot_product_attention(*parts)
        equal_on_every_device(out, wanted)
