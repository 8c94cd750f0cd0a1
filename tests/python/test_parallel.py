"""dspattn.parallel on spawned gloo processes: what a group computes is what one process computes."""

import dataclasses
import importlib.util
import os
import threading
import types

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dspattn
import parallel_problems as problems
from dspattn import _running, parallel
from dspattn.parallel import call
from parallel_foreign import under_context_parallel, under_ulysses
from parallel_pool import Failure, Pool

COUNT = 210  # random problems of the default suite
MORE = 2000  # and of the long one


@pytest.fixture(scope="module")
def pool():
    opened = Pool()
    yield opened
    opened.close()


def succeeded(results):
    for rank, result in enumerate(results):
        assert not isinstance(result, Failure), f"rank {rank}: {result}"
    return results


def compare(pool, first, count):
    drawn = [problems.draw(seed) for seed in range(first, first + count)]
    for world in range(1, 5):
        of_world = [problem for problem in drawn if problem["world"] == world]
        pieces = succeeded(pool.run(problems.many_on_rank, of_world, size=world))
        for index, problem in enumerate(of_world):
            ours = problems.joined(problem, [of_rank[index] for of_rank in pieces])
            worst = problems.difference(problem, ours, problems.whole(problem))
            assert max(worst.values(), default=0.0) <= 1.0, f"{worst} of what is allowed: {problem}"


def test_random_problems_equal_one_process(pool):
    compare(pool, 0, COUNT)


@pytest.mark.rare
def test_many_random_problems_equal_one_process(pool):
    compare(pool, COUNT, MORE)


def test_every_part_of_the_promise_is_drawn():
    drawn = [problems.draw(seed) for seed in range(COUNT)]
    for method in ("ring", "all_to_all"):
        for grouping in ("interleaved", "consecutive"):
            for causal in (False, True):
                for world in (1, 2, 3, 4):
                    key = {"method": method, "grouping": grouping, "is_causal": causal, "world": world}
                    assert any(all(p[name] == value for name, value in key.items()) for p in drawn), key
        own = [p for p in drawn if p["method"] == method]
        assert any(p["heads"] > p["kv_heads"] > 1 for p in own)
        assert any("lengths" in p and p["world"] > 2 for p in own)
        assert any(p.get("n_q", 0) != p.get("n_k", 0) for p in own)
        assert any(p.get("n_k", 0) % 128 and p.get("n_k", 0) > 600 and p["world"] == 4 for p in own)
        for mask in ("lengths", "allowed", "bias"):
            assert any(mask in p["masks"] and p["world"] > 1 for p in own)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_sixteen_bits_err_at_most_twice_as_much_as_plain_low_precision(pool, method, dtype):
    """On the keys that one process keeps; that ranks keep the same ones is the next test's matter."""
    for seed, (world, causal) in enumerate([(2, True), (3, False)]):
        problem = problems.plain_problem(seed, method=method, dtype=dtype, world=world, is_causal=causal)
        pieces = succeeded(pool.run(problems.on_rank, problem, size=world))
        for name, (ours, plain) in problems.errors(problem, problems.joined(problem, pieces)).items():
            assert ours <= 2 * plain, f"{name}: {ours} where plain low precision has {plain}: {problem}"


def kept_on_rank(group, rank, method, pattern, grouping, length):
    q, k = integers(length)
    q, k = (parallel.shard(t, 2, group) for t in (q, k))
    pieces = []
    for start in range(0, length, 128):
        v = parallel.shard(torch.eye(length)[None, None, :, start : start + 128].expand(1, 2, -1, -1), 2, group)
        out = parallel.attention(
            q, k, v, group=group, method=method, pattern=pattern, grouping=grouping, is_causal=True, scale=0.125
        )
        pieces.append(out != 0)
    return parallel.unshard(torch.cat(pieces, -1), 2, group).numpy()


def integers(length):
    generator = torch.Generator().manual_seed(length)
    return [torch.randint(-2, 3, (1, 2, length, 8), generator=generator).float() for _ in range(2)]


@pytest.mark.parametrize("grouping", ["interleaved", "consecutive"])
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_the_same_keys_are_kept(pool, method, grouping):
    """Small integers: many ties, no rounding, so the selection must be the same to the last key."""
    length = 450
    q, k = integers(length)
    options = {"pattern": "2:4", "grouping": grouping, "is_causal": True, "scale": 0.125}
    wanted = dspattn.attention_weights(q, k, **options) != 0
    for world in (2, 3, 4):
        for kept in succeeded(pool.run(kept_on_rank, method, "2:4", grouping, length, size=world)):
            assert torch.equal(torch.from_numpy(kept), wanted)


MEAN_CASES = [
    {}, {"is_causal": True}, {"window": (150, 3)}, {"is_causal": True, "window": (20, None)},
    {"key_lengths": torch.tensor([700, 131])},
    {"is_causal": True, "attn_mask": torch.arange(700).ge(200).view(1, 1, 1, -1)},
]  # fmt: skip


def means_on_rank(group, rank, method):
    q, k, v, cu = of_means()
    found = []
    with torch.no_grad():
        for options in MEAN_CASES:
            pieces = [parallel.shard(t, 2, group) for t in (q, k, v)]
            out = parallel.attention(*pieces, enable_gqa=True, rest="mean", group=group, method=method, **options)
            found.append(parallel.unshard(out, 2, group).numpy())
        rows = [parallel.shard(t[0].transpose(0, 1), 0, group, cu_seqlens=cu) for t in (q, k, v)]
        out = parallel.varlen_attention(*rows, cu, is_causal=True, rest="mean", group=group, method=method)
        found.append(parallel.unshard(out, 0, group, cu_seqlens=cu).numpy())
    return found


def of_means():
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, heads, 700, 8, generator=generator) for heads in (4, 2, 2))
    return q, k, v, torch.tensor([0, 20, 690, 700], dtype=torch.int32)


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_the_rest_goes_to_the_mean_of_all_ranks_values(pool, method):
    q, k, v, cu = of_means()
    wanted = [dspattn.attention(q, k, v, enable_gqa=True, rest="mean", **options) for options in MEAN_CASES]
    rows = [t[0].transpose(0, 1) for t in (q, k, v)]
    wanted.append(dspattn.varlen_attention(*rows, cu, cu, is_causal=True, rest="mean"))
    for world in (2, 3):
        for found in succeeded(pool.run(means_on_rank, method, size=world)):
            for ours, expected in zip(found, wanted, strict=True):
                torch.testing.assert_close(torch.from_numpy(ours), expected, atol=1e-5, rtol=1e-5)


def sharded_and_back(group, rank):
    x = torch.arange(2 * 700 * 3).view(2, 700, 3)
    cu = [0, 300, 300, 310, 700]
    assert torch.equal(parallel.unshard(parallel.shard(x, 1, group), 1, group), x)
    packed = parallel.shard(x, -2, group, cu_seqlens=cu)
    assert torch.equal(parallel.unshard(packed, 1, group, cu_seqlens=torch.tensor(cu)), x)
    piece = parallel.shard(x.float(), 1, group).requires_grad_()
    (parallel.unshard(piece, 1, group) * x).sum().backward()
    assert torch.equal(piece.grad, parallel.shard(x.float(), 1, group))
    positions = parallel.position_ids(700, group)
    assert torch.equal(positions, parallel.shard(torch.arange(700), 0, group))
    labels = parallel.shard_labels(x[..., 0], 1, group, cu_seqlens=cu)
    following = torch.cat([x[:, 1:, 0], x[:, :1, 0]], 1)
    following[:, [299, 309, 699]] = -100
    assert torch.equal(labels, parallel.shard(following, 1, group, cu_seqlens=cu))
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")
    assert torch.equal(parallel.shard(x, 1, mesh), parallel.shard(x, 1, group))
    return True


@pytest.mark.parametrize("world", [1, 3, 4])
def test_cutting_and_joining(pool, world):
    succeeded(pool.run(sharded_and_back, size=world))


def test_layouts_are_balanced_and_complete():
    for world in (1, 2, 3, 4, 7):
        for lengths in (0, 1, 127, 128, 1000, 128 * 64, [5, 0, 3000, 129, 64, 5000], []):
            layout = parallel.layout_of(lengths, world)
            index = torch.cat([layout.index(rank) for rank in range(world)])
            assert sorted(index.tolist()) == list(range(layout.total))
            assert torch.equal(index[layout.inverse()], torch.arange(layout.total))
            for rank in range(world):
                assert all(chunk.start % 128 == 0 for chunk in layout.chunks(rank))
    # Scores under a causal mask: the same number for every rank where the blocks divide.
    layout = parallel.layout_of(128 * 8 * 4, 4)
    scores = [int((layout.positions(rank) + 1).sum()) for rank in range(4)]
    assert max(scores) == min(scores)


def inside_context(group, rank, method):
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 4, 500, 16) for _ in range(3))
    cu = torch.tensor([0, 120, 500], dtype=torch.int32)
    results = []
    with parallel.context(group, method):
        pieces = [parallel.shard(t, 2, group) for t in (q, k, v)]
        results.append(parallel.unshard(dspattn.attention(*pieces, is_causal=True), 2, group))
        with dspattn.use("2:4"):
            out = torch.nn.functional.scaled_dot_product_attention(*pieces)
        results.append(parallel.unshard(out, 2, group))
        rows = [parallel.shard(t[0].transpose(0, 1), 0, group, cu_seqlens=cu) for t in (q, k, v)]
        out = dspattn.varlen_attention(*rows, cu, cu, is_causal=True)
        results.append(parallel.unshard(out, 0, group, cu_seqlens=cu))
    with parallel.context(group, method, cu_seqlens=cu):
        pieces = [parallel.shard(t, 2, group, cu_seqlens=cu) for t in (q, k, v)]
        out = dspattn.attention(*pieces, is_causal=True)
        results.append(parallel.unshard(out[0].transpose(0, 1), 0, group, cu_seqlens=cu))
    wanted = [
        dspattn.attention(q, k, v, is_causal=True),
        dspattn.attention(q, k, v),
        *[dspattn.varlen_attention(*(t[0].transpose(0, 1) for t in (q, k, v)), cu, cu, is_causal=True)] * 2,
    ]
    for ours, expected in zip(results, wanted, strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-6, rtol=1e-5)
    # Compiled around.
    compiled = torch.compile(lambda *t: parallel.attention(*(x * 2 for x in t), group=group) + 1, backend="eager")
    pieces = [parallel.shard(t, 2, group) for t in (q, k, v)]
    torch.testing.assert_close(compiled(*pieces), parallel.attention(*(x * 2 for x in pieces), group=group) + 1)
    return True


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_calls_inside_the_context_go_parallel(pool, method):
    succeeded(pool.run(inside_context, method, size=2))


def test_beside_pytorchs_context_parallel(pool):
    for cut_alike, difference in succeeded(pool.run(under_context_parallel, size=2)):
        assert cut_alike and difference < 1e-5


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_inside_deepspeeds_ulysses(pool):
    succeeded(pool.run(under_ulysses, size=2))


def refused(group, rank, case):
    q, k, v = (torch.randn(1, 2, rows, 8) for rows in (256, 256, 256))
    options = {"group": group, "is_causal": True}
    if case == "heads" and rank == 1:
        q, k, v = (torch.randn(1, 3, 256, 8) for _ in range(3))
    elif case == "pattern" and rank == 0:
        options["pattern"] = "5:4"
    elif case == "rows":
        q, k, v = (torch.randn(1, 2, 100 + rank, 8) for _ in range(3))
    elif case == "causal" and rank == 2:
        options["is_causal"] = False
    elif case == "dtype" and rank == 1:
        q, k, v = (t.bfloat16() for t in (q, k, v))
    elif case == "group":
        options |= {"pattern": "2:3", "grouping": "consecutive"}
    elif case == "mask" and rank == 1:
        options["attn_mask"] = torch.ones(1, 1, 7, 768, dtype=torch.bool)
    elif case == "mask":
        options["attn_mask"] = torch.ones(1, 1, 256, 768, dtype=torch.bool)
    try:
        if case == "lengths":
            q, k, v = (t.squeeze(0).transpose(0, 1) for t in (q, k, v))
            parallel.varlen_attention(q, k, v, [0, 300.5 if rank == 1 else 300, 768], **options)
        else:
            parallel.attention(q, k, v, **options)
    except dspattn.DspattnError as error:
        return str(error)
    return None


# Who refuses its own call, and with what; the others say who it was.
REFUSE_ALONE = {"pattern": (0, "pattern: expected"), "lengths": (1, "cu_seqlens: expected integers")}


@pytest.mark.parametrize(
    "case, words",
    [
        ("heads", ["query.shape", "key.shape", "ranks [1] differ"]),
        ("pattern", ["rank 0: pattern: expected"]),
        ("lengths", ["rank 1: cu_seqlens: expected integers"]),
        ("rows", ["query: expected the pieces that shard() cuts", "[100, 101, 102]"]),
        ("causal", ["rule", "ranks [2] differ"]),
        ("dtype", ["query.dtype"]),
        ("group", ["layout: expected a block that is a multiple of 3", "got 128"]),
        ("mask", ["attn_mask: expected each rank's own rows [256, 256, 256]", "[256, 7, 256]"]),
    ],
)
def test_disagreement_raises_on_every_rank(pool, case, words):
    messages = succeeded(pool.run(refused, case, size=3))
    assert all(messages), messages
    for rank, message in enumerate(messages):
        alone, own = REFUSE_ALONE.get(case, (None, ""))
        if rank == alone:
            assert own in message
        else:
            assert all(word in message for word in words), message


def refused_by_kernels(group, rank, method):
    """What no kernel serves, then a call that is served: nothing of the first one may still be on its way."""
    q = torch.randn(1, 2, 256, 8, generator=torch.Generator().manual_seed(rank))
    messages = []
    for options in ({"kernel": "none_such"}, {"soft_cap": -1.0}, {"scale": -1.0}):
        try:
            parallel.attention(q, q, q, group=group, method=method, **options)
        except dspattn.DspattnError as error:
            messages.append(str(error))
    out = parallel.attention(q, q, q, group=group, method=method)
    return messages, out.isfinite().all().item()


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_what_no_kernel_serves_raises_before_anything_travels(pool, method):
    for messages, finite in succeeded(pool.run(refused_by_kernels, method, size=2)):
        assert len(messages) == 3 and finite
        assert "none_such" in messages[0] and "soft_cap" in messages[1] and "scale" in messages[2]


def dies(group, rank):
    q = torch.randn(1, 2, 256, 8)
    parallel.attention(q, q, q, group=group)
    if rank == 1:
        os._exit(3)
    return parallel.attention(q, q, q, group=group)


def test_a_rank_that_dies_is_an_error_on_the_others():
    """Not a hang: at the latest the group's timeout."""
    pool = Pool(world=2, timeout=15.0)
    try:
        first, second = pool.run(dies)
        assert isinstance(first, Failure) and "DspattnError: group:" in first
        assert second == "died"
    finally:
        pool.close()


def test_both_passes_run_on_one_kernel():
    """On a GPU; the table may choose two for gradients in fp32, which could keep different keys."""
    rule = call.Rule(2, 4, True, True, False, None, None, None, False, "", 0)
    on_gpu = types.SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    trained = call.Plan(fp32=True, wide=True, backward=True)
    assert call.repeatable(rule, trained, on_gpu).kernel == "general_bf16"
    assert call.repeatable(rule, call.Plan(True, True, False), on_gpu).kernel == ""
    assert call.repeatable(rule, call.Plan(False, False, True), on_gpu).kernel == ""
    assert call.repeatable(rule, trained, torch.zeros(1)).kernel == ""
    named = dataclasses.replace(rule, kernel="some")
    assert call.repeatable(named, trained, on_gpu) is named


def test_one_context_open_several_times():
    """In one thread, the last one opened answers; in two, each has its own."""
    outer, inner = parallel.context(), parallel.context()
    with outer, inner:
        with outer:
            assert _running.stand_in() is outer
        assert _running.stand_in() is inner

    seen, opened, closed = [], threading.Event(), threading.Event()

    def second():
        with outer:
            opened.set()
            closed.wait(30)
            seen.append(_running.stand_in())
        seen.append(_running.stand_in())

    thread = threading.Thread(target=second)
    with outer:
        thread.start()
        opened.wait(30)
        assert _running.stand_in() is outer
    assert _running.stand_in() is None
    closed.set()
    thread.join()
    assert seen == [outer, None] and not _running.stand_ins


def checkpointed(group, rank, reentrant):
    """Gradients of pieces whose attention is computed again after the block; and outside of one, inside of another."""
    torch.manual_seed(3)
    whole = torch.randn(1, 4, 500, 16)
    gradients = []
    for again in (False, True):
        piece = parallel.shard(whole, 2, group).requires_grad_()

        def attend(q):
            return dspattn.attention(q, q * 2, q + 1, is_causal=True).sin()

        with parallel.context(group):
            out = checkpoint(attend, piece, use_reentrant=reentrant) if again else attend(piece)
        alone = checkpoint(attend, piece, use_reentrant=reentrant) if again else attend(piece)
        (2 * out).sum().backward()
        with parallel.context(group):
            alone.sum().backward()
        gradients.append(piece.grad)
    torch.testing.assert_close(gradients[1], gradients[0])
    return True


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_remembers_the_context(pool, reentrant):
    succeeded(pool.run(checkpointed, reentrant, size=2))


def test_a_group_of_one_and_wrong_arguments():
    q = torch.randn(1, 2, 300, 8)
    for method in ("ring", "all_to_all"):
        out = parallel.attention(q, q, q, is_causal=True, method=method)
        assert torch.equal(out, dspattn.attention(q, q, q, is_causal=True))
    with pytest.raises(dspattn.DspattnError, match=r'method: expected "ring" or "all_to_all", got .*star'):
        parallel.attention(q, q, q, method="star")
    with pytest.raises(dspattn.DspattnError, match="method: expected"), parallel.context(method="star"):
        dspattn.attention(q, q, q)
    with pytest.raises(dspattn.DspattnError, match=r"key_lengths\.dtype: expected int32 or int64, got float32"):
        parallel.attention(q, q, q, key_lengths=torch.tensor([3.9]))
    with pytest.raises(dspattn.DspattnError, match="cu_seqlens: expected 300 rows"):
        parallel.varlen_attention(*[q[0].transpose(0, 1)] * 3, [0, 100])
    with pytest.raises(dspattn.DspattnError, match="enable_gqa: expected True for 2 heads"):
        parallel.attention(q, q[:, :1], q[:, :1])
    with pytest.raises(dspattn.DspattnError, match="layout: expected one of 1 ranks, got one of 2"):
        parallel.attention(q, q, q, layout=parallel.layout_of(300, 2))
    out, lse = parallel.attention(*(t.requires_grad_() for t in (q, q, q)), return_lse=True)
    with pytest.raises(NotImplementedError, match="return_lse"):
        lse.sum().backward()


def under_a_default_device(group, rank):
    q, k, v, cu = of_means()
    with torch.device("meta"):
        pieces = [parallel.shard(t, 2, group) for t in (q, k, v)]
        out = parallel.attention(*pieces, enable_gqa=True, group=group, is_causal=True)
        mean = parallel.attention(*pieces, enable_gqa=True, group=group, is_causal=True, rest="mean")
        rows = [parallel.shard(t[0].transpose(0, 1), 0, group, cu_seqlens=cu) for t in (q, k, v)]
        packed = parallel.varlen_attention(*rows, cu, group=group, method="all_to_all")
        message = None
        try:
            parallel.attention(*pieces, enable_gqa=True, group=group, scale=-1.0 if rank else None)
        except dspattn.DspattnError as error:
            message = str(error)
        positions = parallel.position_ids(700, group).device.type, parallel.position_ids(7, group, device="cpu").device
        labels = parallel.shard_labels(torch.ones(1, 700, dtype=torch.int64, device="cpu"), 1, group)
        whole = [parallel.unshard(t, 2, group).numpy() for t in (out, mean)]
        assert positions == ("meta", torch.device("cpu")) and labels.is_cpu and "scale: expected" in message
        return [*whole, parallel.unshard(packed, 0, group, cu_seqlens=cu).numpy()]


def test_a_default_device_changes_nothing(pool):
    """Which new tensors get: one that computes nothing, of which nothing can be read."""
    q, k, v, cu = of_means()
    options = {"enable_gqa": True, "is_causal": True}
    wanted = [dspattn.attention(q, k, v, **options), dspattn.attention(q, k, v, rest="mean", **options)]
    wanted.append(dspattn.varlen_attention(*(t[0].transpose(0, 1) for t in (q, k, v)), cu, cu))
    for found in succeeded(pool.run(under_a_default_device, size=2)):
        for ours, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(torch.from_numpy(ours), expected, atol=1e-5, rtol=1e-5)
