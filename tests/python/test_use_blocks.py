"""Which calls belong to a dspattn.use block: threads, tasks, checkpointing, decorated generators, TorchScript."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import dspattn

Q, K, V = (torch.randn(1, 2, 80, 8) for _ in range(3))
PLAIN, PRUNED = sdpa(Q, K, V), {p: dspattn.attention(Q, K, V, pattern=p) for p in ("1:2", "1:4", "2:4")}
THREADS, CALLS = 8, 500
assert all((PLAIN - pruned).abs().max() > 1e-3 for pruned in PRUNED.values())


def nothing_is_left_behind() -> None:
    assert torch.nn.functional.scaled_dot_product_attention is sdpa
    assert torch.backends.mha.get_fastpath_enabled()
    assert not _get_current_function_mode_stack()
    assert torch.equal(sdpa(Q, K, V), PLAIN)


def models() -> list[Callable[[], torch.Tensor]]:
    """Every way attention is reached: the function, the module, the encoder with its fast path."""
    torch.manual_seed(0)
    x = torch.randn(1, 20, 16)
    module = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    encoder = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, dropout=0.0).eval()
    return [lambda: sdpa(Q, K, V), lambda: module(x, x, x, need_weights=False)[0], lambda: encoder(x)]


def test_threads_inside_and_outside_of_blocks() -> None:
    calls = models()
    patterns = [None, "1:2", "2:4"]
    shared = {p: dspattn.use(p, "consecutive") for p in patterns if p is not None}
    with torch.no_grad():
        wanted = {}
        for pattern in patterns:
            for i, call in enumerate(calls):
                if pattern is None:
                    wanted[pattern, i] = call()
                else:
                    with dspattn.use(pattern, "consecutive"):
                        wanted[pattern, i] = call()
    assert all((wanted[None, i] - wanted["1:2", i]).abs().max() > 1e-3 for i in range(len(calls)))
    wrong: list[str] = []
    start = threading.Barrier(THREADS)

    def work(number: int) -> None:
        start.wait()
        with torch.no_grad():
            for step in range(CALLS):
                pattern, i = patterns[(step + number) % 3], (step // 3) % len(calls)
                if pattern is None:
                    out = calls[i]()
                else:
                    with shared[pattern]:
                        out = calls[i]()
                if not torch.equal(out, wanted[pattern, i]):
                    wrong.append(f"thread {number}, step {step}: {pattern}, model {i}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, (len(wrong), wrong[:5])
    inside = sum((step + n) % 3 != 0 for n in range(THREADS) for step in range(CALLS))
    assert sum(block.served for block in shared.values()) == inside
    nothing_is_left_behind()


def test_tasks_that_take_turns() -> None:
    async def task(pattern: str | None, turns: int) -> None:
        for _ in range(turns):
            if pattern is None:
                await asyncio.sleep(0)
                assert torch.equal(sdpa(Q, K, V), PLAIN)
                continue
            with dspattn.use(pattern):
                await asyncio.sleep(0)
                assert torch.equal(sdpa(Q, K, V), PRUNED[pattern])
                await asyncio.sleep(0)
                assert torch.equal(sdpa(Q, K, V), PRUNED[pattern])

    async def run() -> None:
        await asyncio.gather(task("1:2", 5), task(None, 9), task("1:4", 3), task(None, 4))

    asyncio.run(run())
    nothing_is_left_behind()


def checkpointed(reentrant: bool, leaves: list[torch.Tensor]) -> torch.Tensor:
    return checkpoint(lambda *x: sdpa(*x).sin(), *leaves, use_reentrant=reentrant)


def gradients(out: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    for leaf in leaves:
        leaf.grad = None
    out.sum().backward()
    return [leaf.grad.clone() for leaf in leaves]


@pytest.mark.parametrize("backward_in", [None, "dense", "1:4"])
@pytest.mark.parametrize("forward_in", [None, "1:4"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_what_forward_saw(
    reentrant: bool, forward_in: str | None, backward_in: str | None
) -> None:
    leaves = [t.clone().requires_grad_() for t in (Q, K, V)]
    plainly = sdpa(*leaves) if forward_in is None else dspattn.attention(*leaves, pattern=forward_in)
    wanted = gradients(plainly.sin(), leaves)
    if forward_in is None:
        out = checkpointed(reentrant, leaves)
    else:
        with dspattn.use(forward_in):
            out = checkpointed(reentrant, leaves)
    if backward_in is None:
        got = gradients(out, leaves)
    else:
        with dspattn.use(backward_in) as around:
            got = gradients(out, leaves)
        assert around.served == 0
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)
    nothing_is_left_behind()


def test_checkpointing_recomputes_in_another_thread() -> None:
    leaves = [t.clone().requires_grad_() for t in (Q, K, V)]
    wanted = gradients(dspattn.attention(*leaves, pattern="1:4").sin(), leaves)
    with dspattn.use("1:4"):
        out = checkpointed(False, leaves)
    got: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: got.extend(gradients(out, leaves)))
    thread.start()
    thread.join()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_decorated_generator() -> None:
    @dspattn.use("1:4")
    def steps() -> Iterator[torch.Tensor]:
        sent = yield sdpa(Q, K, V)
        assert sent == "sent"
        try:
            yield sdpa(Q, K, V)
        except KeyError:
            yield sdpa(Q, K, V)
        return "value"

    generator = steps()
    assert torch.equal(next(generator), PRUNED["1:4"])
    assert torch.equal(sdpa(Q, K, V), PLAIN), "between its steps nothing is redirected"
    assert torch.equal(generator.send("sent"), PRUNED["1:4"])
    assert torch.equal(generator.throw(KeyError()), PRUNED["1:4"])
    with pytest.raises(StopIteration) as end:
        next(generator)
    assert end.value.value == "value" and steps.__name__ == "steps"
    unfinished = steps()
    next(unfinished)
    unfinished.close()
    nothing_is_left_behind()


def test_decorated_coroutine_and_async_generator() -> None:
    @dspattn.use("1:4")
    async def once() -> torch.Tensor:
        await asyncio.sleep(0)
        return sdpa(Q, K, V)

    @dspattn.use("1:2")
    async def steps() -> AsyncIterator[torch.Tensor]:
        yield sdpa(Q, K, V)
        await asyncio.sleep(0)
        yield sdpa(Q, K, V)

    async def plain() -> torch.Tensor:
        await asyncio.sleep(0)
        return sdpa(Q, K, V)

    async def run() -> list[Any]:
        found = list(await asyncio.gather(once(), plain(), once()))
        async for out in steps():
            assert torch.equal(sdpa(Q, K, V), PLAIN)
            found.append(out)
        return found

    found = asyncio.run(run())
    wanted = [PRUNED["1:4"], PLAIN, PRUNED["1:4"], PRUNED["1:2"], PRUNED["1:2"]]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    nothing_is_left_behind()


def test_decorated_object_and_what_cannot_be_decorated() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return sdpa(q, K, V)

    assert torch.equal(dspattn.use("1:4")(Model())(Q), PRUNED["1:4"])
    with pytest.raises(TypeError, match="class Model"):
        dspattn.use("1:4")(Model)
    with pytest.raises(TypeError, match="callable, got int"):
        dspattn.use("1:4")(3)


class Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchscript_is_not_passed_by_in_silence() -> None:
    scripted = [
        torch.jit.trace(sdpa, (Q, K, V)),
        torch.jit.trace(Attention(), (Q, K, V)),
        torch.jit.script(Attention()),
    ]
    without_attention = torch.jit.trace(torch.sin, (Q,))
    for function in scripted:
        assert torch.equal(function(Q, K, V), PLAIN)
        with (
            pytest.raises(dspattn.DspattnError, match=r"TorchScript.*scaled_dot_product_attention"),
            dspattn.use("1:4"),
        ):
            function(Q, K, V)
        with pytest.warns(UserWarning, match=r"1 x .*TorchScript"), dspattn.use("1:4", strict=False) as switched:
            assert torch.equal(function(Q, K, V), PLAIN)
        assert switched.served == 0 and sum(switched.left.values()) == 1
    with dspattn.use("1:4"):
        assert torch.equal(without_attention(Q), Q.sin())
    nothing_is_left_behind()


def test_exported_programs_and_operators_are_served() -> None:
    program = torch.export.export(Attention(), (Q, K, V)).module()
    with dspattn.use("1:4") as switched:
        outs = [program(Q, K, V), torch.ops.aten.scaled_dot_product_attention(Q, K, V)]
    assert switched.served == 2 and all(torch.equal(out, PRUNED["1:4"]) for out in outs)


def test_call_left_to_pytorch_is_not_taken_by_the_block_around() -> None:
    with dspattn.use("1:4") as outer:
        with pytest.warns(UserWarning, match="float64"), dspattn.use("1:2", strict=False) as inner:
            out = sdpa(Q.double(), K.double(), V.double())
        assert torch.equal(sdpa(Q, K, V), PRUNED["1:4"])
    assert (outer.served, inner.served, sum(inner.left.values())) == (1, 0, 1)
    assert torch.equal(out, sdpa(Q.double(), K.double(), V.double()))


def test_nested_blocks_around_a_module() -> None:
    module = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(1, 20, 16)
    with dspattn.use("1:2", "consecutive") as one:
        wanted = module(x, x, x, need_weights=False)[0]
    with dspattn.use("1:4") as outer, torch.device("cpu"), dspattn.use("1:2", "consecutive") as inner:
        got = module(x, x, x, need_weights=False)[0]
    assert torch.equal(got, wanted) and (one.served, outer.served, inner.served) == (1, 0, 1)


def test_compiled_code_follows_the_block() -> None:
    compiled = torch.compile(lambda: sdpa(Q, K, V) * 2, backend="eager", fullgraph=True)
    with torch.no_grad():
        for pattern in (None, "1:2", "1:4", None):
            if pattern is None:
                assert torch.equal(compiled(), PLAIN * 2)
            else:
                with dspattn.use(pattern):
                    assert torch.equal(compiled(), PRUNED[pattern] * 2)


def test_compiled_module_is_pruned_or_raises() -> None:
    """Code that is compiled takes PyTorch's fused layers, mode or not; none of them passes in silence."""
    _, module, encoder = models()
    with torch.no_grad(), dspattn.use("1:4", "consecutive"):
        torch.testing.assert_close(torch.compile(module, backend="eager")(), module())
        with pytest.raises(dspattn.DspattnError, match=r"_transformer_encoder_layer_fwd.*set_fastpath_enabled"):
            torch.compile(encoder, backend="eager")()
