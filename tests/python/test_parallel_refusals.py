"""What one rank alone has wrong is an error on every rank of dspattn.parallel, with its reason, and the next call is
served: no rank waits for one that has left."""

import dataclasses

import pytest
import torch

import dspattn
from dspattn import parallel
from parallel_pool import Failure, Pool

WORLD = 3
ROWS = 256  # of each rank; 768 of all
WRONG = 1  # the rank that is


@pytest.fixture(scope="module")
def pool():
    opened = Pool(world=WORLD, timeout=20.0)
    yield opened
    opened.close()


def piece(heads=2, rows=ROWS):
    return torch.randn(1, heads, rows, 8)


def message_of(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def still_in_step(group):
    q = piece()
    assert parallel.attention(q, q, q, group=group).isfinite().all()


def distributed(tensor):
    """A DTensor that needs no group of its own."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh("cpu", list(range(WORLD)), _init_backend=False)
    return DTensor.from_local(tensor, mesh, [Shard(2)], run_check=False)


class Unreadable:
    """Of no use as any argument, and not even printable in every way."""

    def __iter__(self):
        raise KeyError("none of it")


def other_layout(kind):
    layout = parallel.layout_of(ROWS * WORLD, WORLD)
    if kind == "world":
        return parallel.layout_of(ROWS * WORLD, WORLD - 1)
    if kind == "block":
        return parallel.layout_of(ROWS * WORLD, WORLD, block=256)
    cut = (layout.cut[0], layout.cut[2], layout.cut[1])
    return dataclasses.replace(layout, cut=cut)


# Of attention: what one rank gives, by name, and what is said of it.
WRONG_ARGUMENTS = {
    "query kind": ({"query": "text"}, "query: expected a tensor"),
    "query none": ({"query": None}, "query: expected a tensor"),
    "query dims": ({"query": torch.zeros(ROWS, 8)}, "query: expected [batch, heads, rows, d]"),
    "query sparse": ({"query": lambda: piece().to_sparse()}, "query: expected a strided tensor"),
    "query mkldnn": ({"query": lambda: piece().to_mkldnn()}, "query: expected a strided tensor"),
    "query meta": ({"query": lambda: piece().to("meta")}, "query: expected"),
    "all meta": ({name: lambda: piece().to("meta") for name in ("query", "key", "value")}, "got one on meta"),
    "query distributed": ({"query": lambda: distributed(piece())}, "query: expected this rank's piece, got a DTensor"),
    "query integers": ({"query": lambda: piece().long()}, "query.dtype: expected"),
    "key kind": ({"key": 3}, "key: expected a tensor"),
    "value dtype": ({"value": lambda: piece().double()}, "value.dtype: expected"),
    "value rows": ({"value": lambda: piece(rows=100)}, "value: expected key's heads and rows"),
    "heads": ({"query": lambda: piece(heads=3)}, "enable_gqa: expected True"),
    "mask kind": ({"attn_mask": [1]}, "attn_mask: expected a tensor"),
    "mask dtype": ({"attn_mask": torch.zeros(1, 3 * ROWS).double()}, "attn_mask.dtype: expected"),
    "mask shape": ({"attn_mask": torch.zeros(1, 5)}, "masks: expected the same"),
    "mask meta": ({"attn_mask": torch.zeros(1, 3 * ROWS, device="meta")}, "attn_mask: expected a tensor on cpu"),
    "mask gradient": ({"attn_mask": torch.zeros(1, 3 * ROWS, requires_grad=True)}, "requires_grad=False"),
    "bias alone": ({"attn_bias": torch.zeros(2, 3, 4, 5, 6)}, "attn_bias: expected at most 4"),
    "biases": ({"attn_mask": torch.zeros(1, 5), "attn_bias": torch.zeros(1, 6)}, "RuntimeError: The size of tensor a"),
    "lengths kind": ({"key_lengths": [3]}, "key_lengths: expected a tensor"),
    "lengths dtype": ({"key_lengths": torch.tensor([0.5])}, "key_lengths.dtype: expected"),
    "lengths meta": ({"key_lengths": torch.tensor([3], device="meta")}, "key_lengths: expected a tensor on cpu"),
    "lengths": ({"key_lengths": torch.tensor([-1])}, "key_lengths: expected the same"),
    "dropout": ({"dropout_p": 0.5}, "dropout_p: expected 0"),
    "dropout kind": ({"dropout_p": torch.zeros(2)}, "dropout_p: expected a number"),
    "causal": ({"is_causal": 2}, "is_causal: expected a bool"),
    "gqa": ({"enable_gqa": "yes"}, "enable_gqa: expected a bool"),
    "return_lse": ({"return_lse": 0.5}, "return_lse: expected a bool"),
    "tf32": ({"allow_tf32": None}, "allow_tf32: expected a bool"),
    "scale": ({"scale": -1.0}, "scale: expected"),
    "scale kind": ({"scale": "one"}, "scale: expected a number"),
    "offset": ({"offset": 2**40}, "offset: expected"),
    "offset kind": ({"offset": 0.5}, "offset: expected an integer"),
    "soft cap": ({"soft_cap": float("nan")}, "soft_cap: expected"),
    "kernel": ({"kernel": "none_such"}, "none_such"),
    "kernel kind": ({"kernel": None}, "kernel: expected a string"),
    "pattern": ({"pattern": "5:4"}, "pattern: expected"),
    "pattern kind": ({"pattern": 24}, "pattern: expected"),
    "grouping": ({"grouping": "none"}, "grouping: expected"),
    "rest": ({"rest": "none"}, "rest: expected"),
    "rest and mask": (
        {"rest": "mean", "attn_mask": torch.zeros(ROWS, 3 * ROWS)},
        'attn_mask: expected one row for rest="mean"',
    ),
    "selection": ({"selection": torch.zeros(2)}, 'selection: expected "own"'),
    "sinks": ({"sinks": torch.zeros(2)}, "sinks: expected None"),
    "window": ({"window": (1, 2, 3)}, "window: expected (left, right)"),
    "window side": ({"window": (1, -2)}, "window[1]: expected"),
    "window kind": ({"window": Unreadable()}, "window[0]: expected"),
    "alignment": ({"alignment": "middle"}, "alignment: expected"),
    "out_dtype": ({"out_dtype": torch.float64}, "out_dtype: expected"),
    "out_dtype kind": ({"out_dtype": "float32"}, "out_dtype: expected"),
    "method": ({"method": "star"}, 'method: expected "ring" or "all_to_all"'),
    "method kind": ({"method": ["ring"]}, 'method: expected "ring" or "all_to_all"'),
    "layout kind": ({"layout": "blocks"}, "layout: expected one of layout_of()"),
    "layout world": ({"layout": other_layout("world")}, "layout: expected the same"),
    "layout block": ({"layout": other_layout("block")}, "layout: expected the same"),
    "layout changed": ({"layout": other_layout("cut")}, "layout: expected one of layout_of()"),
}


def given(argument):
    return argument() if callable(argument) else argument


def wrong_argument(group, rank, case, entry):
    arguments = {name: piece() for name in ("query", "key", "value")} | {"group": group, "is_causal": True}
    if case.startswith("layout"):
        arguments["layout"] = parallel.layout_of(ROWS * WORLD, WORLD)
    if rank == WRONG:
        arguments |= {name: given(argument) for name, argument in WRONG_ARGUMENTS[case][0].items()}
    if entry == "context":
        options = {name: arguments.pop(name) for name in ("group", "method", "layout") if name in arguments}

        def call():
            with parallel.context(**options):
                return dspattn.attention(**arguments)
    else:

        def call():
            return parallel.attention(**arguments)

    message = message_of(call)
    still_in_step(group)
    return message


def require_all(messages, words):
    """The rank that is wrong says so, the others that it was that one; where only all ranks' arguments together show
    it, all say the same."""
    for rank, message in enumerate(messages):
        assert not isinstance(message, Failure), message
        assert message is not None and words in message, f"rank {rank}: {message}"
        together = "expected the same" in words or "expected the pieces" in words
        assert together or (f"rank {WRONG}: " in message) == (rank != WRONG), f"rank {rank}: {message}"


@pytest.mark.parametrize("entry", ["attention", "context"])
@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_an_argument_wrong_on_one_rank(pool, case, entry):
    require_all(pool.run(wrong_argument, case, entry), WRONG_ARGUMENTS[case][1])


CU = [0, 300, ROWS * WORLD]
# Of packed batches: whether the context has the lengths, what one rank gives, and what is said of it.
WRONG_PACKED = {
    "query kind": ({"query": "text"}, "query: expected a tensor"),
    "query dims": ({"query": torch.zeros(ROWS, 8)}, "query: expected"),
    "lengths kind": ({"cu_seqlens": 5}, "cu_seqlens: expected integers"),
    "lengths unreadable": ({"cu_seqlens": Unreadable()}, "KeyError"),
    "lengths meta": ({"cu_seqlens": torch.zeros(3, device="meta")}, "cu_seqlens: expected lengths that can be read"),
    "lengths parts": ({"cu_seqlens": torch.tensor([0.0, 300.5, 768.0])}, "cu_seqlens: expected integers"),
    "lengths two-dimensional": ({"cu_seqlens": torch.zeros(2, 2, dtype=torch.int64)}, "cu_seqlens: expected integers"),
    "lengths other": ({"cu_seqlens": [0, 301, 768]}, "cu_seqlens: expected the same"),
    "lengths fall": ({"cu_seqlens": [0, 900, 768]}, "cu_seqlens: expected the same"),
    "dropout": ({"dropout_p": 0.5}, "dropout_p: expected 0"),
    "causal": ({"is_causal": 2}, "is_causal: expected a bool"),
    "window": ({"window": "both sides"}, "window[0]: expected a 64-bit integer"),
    "pattern": ({"pattern": "5:4"}, "pattern: expected"),
    "method": ({"method": "star"}, "method: expected"),
    "layout": ({"layout": 3}, "layout: expected one of layout_of()"),
}


def wrong_packed(group, rank, case, entry):
    rows = parallel.layout_of([300, ROWS * WORLD - 300], WORLD).rows(rank)
    arguments = {name: torch.randn(rows, 2, 8) for name in ("query", "key", "value")}
    arguments |= {"group": group, "is_causal": True, "cu_seqlens": CU}
    if rank == WRONG:
        arguments |= {name: given(argument) for name, argument in WRONG_PACKED[case][0].items()}
    if entry == "varlen_attention":

        def call():
            return parallel.varlen_attention(**arguments)
    else:
        cu = arguments.pop("cu_seqlens")
        options = {name: arguments.pop(name) for name in ("group", "method", "layout") if name in arguments}

        def call():
            if entry == "context of lengths":
                with parallel.context(**options, cu_seqlens=cu):
                    for name in ("query", "key", "value"):
                        if isinstance(arguments[name], torch.Tensor) and arguments[name].dim() == 3:
                            arguments[name] = arguments[name].transpose(0, 1)[None]
                    return dspattn.attention(**arguments)
            with parallel.context(**options):
                return dspattn.varlen_attention(**arguments, cu_seqlens_q=cu, cu_seqlens_k=cu)

    message = message_of(call)
    still_in_step(group)
    return message


@pytest.mark.parametrize("entry", ["varlen_attention", "context", "context of lengths"])
@pytest.mark.parametrize("case", WRONG_PACKED)
def test_a_packed_batch_wrong_on_one_rank(pool, case, entry):
    require_all(pool.run(wrong_packed, case, entry), WRONG_PACKED[case][1])


# Of the context alone.
WRONG_IN_CONTEXT = {
    "mask": ({"attn_mask": torch.ones(1, 1)}, "attn_mask: expected none in a packed batch"),
    "bias": ({"attn_bias": torch.ones(1, 1)}, "attn_bias: expected none in a packed batch"),
    "lengths": ({"key_lengths": torch.ones(1)}, "key_lengths: expected none in a packed batch"),
    "batch": ({"query": torch.zeros(2, 2, ROWS, 8)}, "query: expected [1, heads, rows, d] in a packed batch"),
    "key dims": ({"key": torch.zeros(2, ROWS, 8)}, "key: expected [1, heads, rows, d] in a packed batch"),
    "heads": ({"query": torch.zeros(1, 4, ROWS, 8)}, "enable_gqa: expected True"),
    "flag": ({"enable_gqa": 1}, "enable_gqa: expected a bool"),
    "alignment": ({"alignment": "middle"}, "alignment: expected"),
}
WRONG_PACKED_IN_CONTEXT = {
    "mask": ({"attn_mask": torch.ones(1, 1)}, "attn_mask: expected none for a packed batch"),
    "keys": ({"cu_seqlens_k": torch.tensor([0, 768])}, "cu_seqlens_k: expected cu_seqlens_q's"),
    "key kind": ({"cu_seqlens_k": 3}, "cu_seqlens: expected integers"),
    "alignment": ({"alignment": "middle"}, "alignment: expected"),
    "longest": ({"max_seqlen_q": "all"}, "max_seqlen_q: expected an integer"),
}


def wrong_in_context(group, rank, case, packed):
    cu = torch.tensor(CU)
    rows = parallel.layout_of([300, ROWS * WORLD - 300], WORLD).rows(rank)
    shape = (rows, 2, 8) if packed else (1, 2, rows, 8)
    arguments = {name: torch.randn(shape) for name in ("query", "key", "value")}
    if packed:
        arguments |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    if rank == WRONG:
        arguments |= (WRONG_PACKED_IN_CONTEXT if packed else WRONG_IN_CONTEXT)[case][0]

    def call():
        with parallel.context(group, cu_seqlens=None if packed else cu):
            (dspattn.varlen_attention if packed else dspattn.attention)(**arguments)

    message = message_of(call)
    still_in_step(group)
    return message


@pytest.mark.parametrize("case", WRONG_IN_CONTEXT)
def test_a_row_of_sequences_wrong_on_one_rank(pool, case):
    require_all(pool.run(wrong_in_context, case, False), WRONG_IN_CONTEXT[case][1])


@pytest.mark.parametrize("case", WRONG_PACKED_IN_CONTEXT)
def test_a_packed_call_in_a_context_wrong_on_one_rank(pool, case):
    require_all(pool.run(wrong_in_context, case, True), WRONG_PACKED_IN_CONTEXT[case][1])


WRONG_UNSHARD = {
    "kind": ({"x": [1]}, "x: expected a tensor"),
    "sparse": ({"x": torch.zeros(ROWS, 2).to_sparse()}, "x: expected a strided tensor"),
    "shape": ({"x": torch.zeros(ROWS, 3)}, "x.shape: expected the same"),
    "dims": ({"x": torch.zeros(1, ROWS, 2)}, "x.shape: expected the same"),
    "rows": ({"x": torch.zeros(7, 2)}, "x: expected the pieces that shard() cuts"),
    "dtype": ({"x": torch.zeros(ROWS, 2).double()}, "x.dtype: expected the same"),
    "meta": ({"x": torch.zeros(ROWS, 2, device="meta")}, "x: expected a tensor with memory, got one on meta"),
    "dim": ({"dim": 2}, "dim: expected one of x's 2 dimensions"),
    "dim kind": ({"dim": "rows"}, "dim: expected one of x's 2 dimensions"),
    "lengths": ({"cu_seqlens": 5}, "cu_seqlens: expected integers"),
    "lengths other": ({"cu_seqlens": [0, 1, 768]}, "cu_seqlens: expected the same"),
    "layout kind": ({"layout": 5}, "layout: expected one of layout_of()"),
    "layout world": ({"layout": other_layout("world")}, "layout: expected the same"),
    "layout changed": ({"layout": other_layout("cut")}, "layout: expected one of layout_of()"),
}


def wrong_unshard(group, rank, case):
    arguments = {"x": torch.zeros(ROWS, 2), "dim": 0, "group": group}
    if case.startswith("layout"):
        arguments["layout"] = parallel.layout_of(ROWS * WORLD, WORLD)
    if rank == WRONG:
        arguments |= WRONG_UNSHARD[case][0]
    message = message_of(lambda: parallel.unshard(**arguments))
    still_in_step(group)
    return message


@pytest.mark.parametrize("case", WRONG_UNSHARD)
def test_joining_what_is_wrong_on_one_rank(pool, case):
    require_all(pool.run(wrong_unshard, case), WRONG_UNSHARD[case][1])


def test_a_dimension_may_be_counted_from_either_end(pool):
    layouts = [parallel.layout_of(18, WORLD).rows(rank) for rank in range(WORLD)]
    assert layouts == [18, 0, 0]
    assert pool.run(unshard_dims) == [True] * WORLD


def unshard_dims(group, rank):
    x = torch.arange(18).view(1, 18)[:, : 18 if rank == 0 else 0]
    return torch.equal(parallel.unshard(x, 1 if rank == 0 else -1, group), torch.arange(18).view(1, 18))


def backward_of(group, rank, method, case):
    q, k, v = (piece().requires_grad_() for _ in range(3))
    out, lse = parallel.attention(q * 1, k * 1, v * 1, group=group, method=method, return_lse=True)
    loss = out.sum()
    if rank == WRONG and case == "lse":
        loss = loss + lse.sum()
    elif rank == WRONG and case == "written":
        with torch.no_grad():
            out.mul_(2)
    elif case == "twice":
        loss.backward(retain_graph=rank != WRONG)
    elif rank == WRONG and case == "other":
        message = message_of(lambda: parallel.attention(q, k, v, group=group, method=method))
        still_in_step(group)
        return message
    elif case == "graph":
        (gradient,) = torch.autograd.grad(loss, q, create_graph=rank == WRONG)
        message = message_of(lambda: gradient.sum().backward()) if rank == WRONG else None
        still_in_step(group)
        return message, gradient.isfinite().all().item()
    message = message_of(loss.backward)
    still_in_step(group)
    return message


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
@pytest.mark.parametrize(
    "case, words",
    [
        ("lse", "return_lse: the gradient through the LSE"),
        ("written", "modified by an inplace operation"),
        ("twice", "backward through the graph a second time"),
        ("other", "call: expected the same on every rank, ranks [1] differ"),
    ],
)
def test_gradients_wrong_on_one_rank(pool, case, words, method):
    if (case, method) == ("written", "all_to_all"):
        pytest.skip("nothing that the caller can write to is kept")
    require_all(pool.run(backward_of, method, case), words)


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_a_graph_of_the_gradients_on_one_rank(pool, method):
    """Gradients are there for all; only those of gradients are not."""
    for rank, (message, finite) in enumerate(pool.run(backward_of, method, "graph")):
        assert finite and ("first-order gradients only" in message if rank == WRONG else message is None), message


BLOCKS = dspattn.block_masks.sliding_window(128)
OF_ALL_KEYS = {
    "attention_weights": lambda q: dspattn.attention_weights(q, q),
    "attention_with_cache": lambda q: dspattn.attention_with_cache(q, q, q),
    "block_attention": lambda q: dspattn.block_attention(q, q, q, BLOCKS, pattern="1:2"),
}


def function_of_all_keys(group, rank, name):
    q = piece()

    def call():
        with parallel.context(group):
            OF_ALL_KEYS[name](q) if rank == WRONG else dspattn.attention(q, q, q)

    message = message_of(call)
    still_in_step(group)
    return message


@pytest.mark.parametrize("name", OF_ALL_KEYS)
def test_functions_of_all_keys_are_refused(pool, name):
    require_all(pool.run(function_of_all_keys, name), f"{name}: expected no dspattn.parallel.context")
    q = piece()
    with parallel.context():  # a group of one has the whole
        assert torch.equal(dspattn.attention_weights(q, q), dspattn.attention_weights(q, q))


def message_with(group, rank, options):
    """Of a call that has these options on every rank."""
    message = message_of(lambda: parallel.attention(piece(), piece(), piece(), group=group, **options))
    still_in_step(group)
    return message


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_offsets_that_some_piece_could_not_have(pool, method):
    """Each rank's pieces have offsets of their own, of which only some may be too far."""
    for offset in (2**39 - 5, -(2**39) + 5):
        for message in pool.run(message_with, {"offset": offset, "method": method}):
            assert message is not None and "offset: expected from -549755813120 to 549755813120" in message
    assert pool.run(message_with, {"offset": 2**39 - 3 * ROWS, "method": method}) == [None] * WORLD


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_lengths_past_the_end(pool, method):
    for message in pool.run(message_with, {"key_lengths": torch.tensor([5000]), "method": method}):
        assert message is not None
        assert "key_lengths[0]: expected a length from 0 to the sequence's keys, 768, got 5000" in message


def test_a_window_without_end_has_the_mean_of_all():
    q, k, v = (piece() for _ in range(3))
    for options in ({"window": (None, 2**63 - 1)}, {"window": (2**63 - 1, 3), "offset": -5}):
        wanted = dspattn.attention(q, k, v, rest="mean", **options)
        torch.testing.assert_close(parallel.attention(q, k, v, rest="mean", **options), wanted, atol=1e-5, rtol=1e-5)


def test_positions_of_another_layout():
    with pytest.raises(dspattn.DspattnError, match="layout: expected one of 1 ranks, got one of 2"):
        parallel.position_ids(300, layout=parallel.layout_of(300, 2))
    with pytest.raises(dspattn.DspattnError, match="layout: expected 300 rows"):
        parallel.position_ids(300, layout=parallel.layout_of(200, 1))
    with pytest.raises(dspattn.DspattnError, match=r"layout: expected one of lengths \(300,\)"):
        parallel.position_ids(300, layout=parallel.layout_of([200, 100], 1))
    with pytest.raises(dspattn.DspattnError, match="layout: expected one of layout_of"):
        parallel.shard(torch.zeros(3), 0, layout=3)
