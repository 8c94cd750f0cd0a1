"""dspattn.parallel with CUDA tensors: two processes on one card, by NCCL where it takes two ranks on a card, else by
gloo with what travels staged in host memory. Skipped without a GPU; a problem that no kernel serves there is skipped
with the kernels' reasons."""

import pytest
import torch

import dspattn
import parallel_problems as problems
from dspattn import parallel
from parallel_pool import Failure, Pool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use")


SECONDS = 20.0  # until a transfer that nobody answers is an error


def reduced(group, rank):
    total = torch.ones(1, device="cuda")
    torch.distributed.all_reduce(total, group=group)
    return float(total)


@pytest.fixture(scope="module")
def pool():
    for backend in ("nccl", "gloo"):
        opened = Pool(world=2, timeout=SECONDS, backend=backend)
        if all(result == 2.0 for result in opened.run(reduced)):
            print(f"two processes on one card by {backend}")
            yield opened
            opened.close()
            return
        opened.close()
    pytest.fail("neither NCCL nor gloo moves CUDA tensors between two processes on this card")


def joined(pool, problem):
    pieces = pool.run(problems.on_rank, problem)
    reasons = [str(piece) for piece in pieces if isinstance(piece, Failure)]
    if reasons and all("DspattnError: kernel " in reason or "refused the call" in reason for reason in reasons):
        pytest.skip(f"no kernel serves this here: {reasons[0].splitlines()[0]}")
    assert not reasons, reasons
    return problems.joined(problem, pieces)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype,pattern", [("bfloat16", "2:4"), ("float16", "2:4"), ("bfloat16", "1:2")])
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_sixteen_bits_err_at_most_twice_as_much_as_plain_low_precision(pool, method, dtype, pattern, causal):
    problem = problems.plain_problem(
        1, device="cuda", world=2, method=method, dtype=dtype, pattern=pattern, is_causal=causal, d=64, d_v=64
    )
    for name, (ours, plain) in problems.errors(problem, joined(pool, problem)).items():
        assert ours <= 2 * plain, f"{name}: {ours} where plain low precision has {plain}: {problem}"


def by_the_fused_kernel(group, rank, causal):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 4, 700, 64, generator=generator).cuda().bfloat16() for _ in range(3))
    options = {"pattern": "2:4", "is_causal": causal, "kernel": "sm90_fused_2_4_bf16_d64"}
    with torch.no_grad():
        pieces = [parallel.shard(t, 2, group) for t in (q, k, v)]
        out = parallel.unshard(parallel.attention(*pieces, group=group, method="ring", **options), 2, group)
        whole = dspattn.attention(q, k, v, out_dtype=torch.float32, **options)
    assert whole.dtype == torch.float32
    return float((out - whole).abs().max() / whole.abs().max())


@pytest.mark.parametrize("causal", [True, False])
def test_the_fused_kernel_writes_the_parts_of_a_ring(pool, causal):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    for difference in pool.run(by_the_fused_kernel, causal):
        assert not isinstance(difference, Failure), difference
        assert difference < 2**-7  # weights and results in bf16


@pytest.mark.parametrize("lengths", [None, [300, 5, 0, 900]], ids=["one sequence", "packed"])
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_float32_equals_one_process(pool, method, lengths):
    """Products in tf32: what differs is the order in which parts are added up, and which parts are rounded."""
    given = {"lengths": lengths} if lengths else {}
    problem = problems.plain_problem(
        2, device="cuda", world=2, method=method, dtype="float32", pattern="1:2", d=64, d_v=64, integers=True, **given
    )
    for name, ours, wanted in zip(problems.GRADIENTS, joined(pool, problem), problems.whole(problem), strict=True):
        allowed = 5e-3 * float(wanted[wanted.isfinite()].abs().max())
        torch.testing.assert_close(ours, wanted, atol=allowed, rtol=5e-3, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("seed", range(24))
def test_random_problems_equal_one_process(pool, seed):
    """Those of the processes on CPUs, all in float32: uneven lengths, packed batches, grouped heads,
    both groupings, masks, forward and all gradients."""
    problem = problems.draw(seed) | {"device": "cuda", "world": 2, "dtype": "float32", "allow_tf32": False}
    worst = problems.difference(problem, joined(pool, problem), problems.whole(problem))
    assert max(worst.values(), default=0.0) <= 1.0, f"{worst} of what is allowed: {problem}"


def means(group, rank, method, causal):
    q, k, v = of_means()
    options = {"is_causal": causal, "rest": "mean", "allow_tf32": False, "enable_gqa": True}
    with torch.no_grad():
        pieces = [parallel.shard(t, 2, group) for t in (q, k, v)]
        out = parallel.unshard(parallel.attention(*pieces, group=group, method=method, **options), 2, group)
        return float((out - dspattn.attention(q, k, v, **options)).abs().max())


def of_means():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, heads, 700, 32, generator=generator).cuda() for heads in (4, 2, 2)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_the_rest_goes_to_the_mean_of_all_ranks_values(pool, method, causal):
    for difference in pool.run(means, method, causal):
        assert not isinstance(difference, Failure), difference
        assert difference < 2e-5
