"""The pipeline's nonzeros and metadata in PyTorch's own semi-structured products.

Needs a CUDA GPU, torch and the built library (DSPATTN_BENCH_LIBRARY); skipped otherwise.
"""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

from torch.sparse._semi_structured_conversions import (  # noqa: E402
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

from bench.common import native  # noqa: E402
from bench.pipeline.problem import Pipeline  # noqa: E402


@pytest.fixture(scope="module")
def library():
    try:
        native.library()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return None  # the one the variable names


def make(library, dtype, pattern, n=256, d=64, batch=1, heads=2, integers=False):
    torch.manual_seed(3)
    shape = (batch, heads, n, d)
    if integers:
        q, k = (torch.randint(-2, 3, shape, device="cuda").to(dtype) for _ in range(2))
    else:
        q, k = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
    v = torch.randn(shape, device="cuda").to(dtype)
    return Pipeline(library, q, k, v, pattern), q, k, v


@pytest.mark.parametrize(
    "dtype,pattern",
    [(torch.bfloat16, (2, 4)), (torch.float16, (2, 4)), (torch.bfloat16, (1, 2)), (torch.float32, (1, 2))],
)
def test_torch_reads_our_encoding(library, dtype, pattern):
    """PyTorch decompresses our bytes to the scores that it computes itself, at the places we kept."""
    pipeline, q, k, _ = make(library, dtype, pattern, integers=True)
    pipeline.qk_prune()
    dense = (q.double() @ k.double().transpose(-1, -2)) / 8.0
    for head in range(2):
        got = sparse_semi_structured_to_dense_cutlass(pipeline.nonzeros[0, head], pipeline.metadata[0, head]).double()
        kept = got != 0
        assert torch.equal(got[kept], dense[0, head][kept])
        group = pattern[1]
        top = dense[0, head].view(256, -1, group).topk(pattern[0], dim=-1).values.sum(-1)
        ours = (got.view(256, -1, group)).sum(-1)
        assert torch.equal(ours, top)  # the kept ones are the largest


@pytest.mark.parametrize("dtype,pattern", [(torch.bfloat16, (2, 4)), (torch.float16, (2, 4)), (torch.float32, (1, 2))])
def test_metadata_is_bit_equal_with_torchs_conversion(library, dtype, pattern):
    """Where exactly half of each group is nonzero, PyTorch's conversion has no freedom: the bytes must agree."""
    pipeline, _q, _k, _ = make(library, dtype, pattern)
    pipeline.qk_prune()
    pipeline.softmax()
    weights, metadata = pipeline.nonzeros[0, 1].clone(), pipeline.metadata[0, 1].clone()
    weights[weights == 0] = 1e-3  # underflowed weights would leave the conversion a choice
    dense = sparse_semi_structured_to_dense_cutlass(weights, metadata)
    sparse, encoded = sparse_semi_structured_from_dense_cutlass(dense)
    assert torch.equal(sparse, weights)
    assert torch.equal(encoded.view(-1), metadata.view(-1))


def close(ours, theirs):
    tolerance = 1e-3 if ours.dtype == torch.float32 else 2 * torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def run_all(library, dtype, pattern):
    """One head after the three functions: weights without zeros, which would leave an encoder a choice."""
    pipeline, _, _, v = make(library, dtype, pattern)
    pipeline.qk_prune()
    pipeline.softmax()
    pipeline.nonzeros[pipeline.nonzeros == 0] = 1e-3
    pipeline.pv_sparse()
    return pipeline.nonzeros[0, 1], pipeline.metadata[0, 1], v[0, 1], pipeline.out[0, 1]


@pytest.mark.parametrize("dtype,pattern", [(torch.bfloat16, (2, 4)), (torch.float16, (2, 4)), (torch.float32, (1, 2))])
def test_cutlass_product_is_ours(library, dtype, pattern):
    """PyTorch's CUTLASS product takes our bytes as they are. It accepts compute capability 8.x only."""
    weights, metadata, v, out = run_all(library, dtype, pattern)
    try:
        theirs = torch._sparse_semi_structured_mm(weights, metadata, v.t().contiguous().t())
    except RuntimeError as error:
        pytest.skip(f"this PyTorch has no such product: {str(error).splitlines()[0]}")
    close(out, theirs)


def needs_cusparselt():
    if not torch.backends.cusparselt.is_available():
        pytest.skip("this PyTorch has no cuSPARSELt")


@pytest.mark.parametrize("dtype,pattern", [(torch.bfloat16, (2, 4)), (torch.float16, (2, 4)), (torch.float32, (1, 2))])
def test_cusparselt_product_is_ours(library, dtype, pattern):
    """PyTorch's cuSPARSELt product of the matrix that our bytes stand for."""
    needs_cusparselt()
    weights, metadata, v, out = run_all(library, dtype, pattern)
    dense = sparse_semi_structured_to_dense_cutlass(weights, metadata)
    close(out, torch._cslt_sparse_mm(torch._cslt_compress(dense), v.t().contiguous().t()))


def codes_of(dense):
    """The code of every group of four, as the hardware has it: index of the first kept element, of the second << 2."""
    kept = (dense.view(-1, 4) != 0).nonzero()[:, 1].view(-1, 2)
    return kept[:, 0] | kept[:, 1] << 2


def nibbles_of(metadata):
    return torch.stack((metadata & 15, metadata >> 4), -1).view(-1).long()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cusparselt_takes_our_nonzeros_and_permuted_metadata(library, dtype):
    """cuSPARSELt keeps nonzeros in our order and the codes in an order of its own. That order is found by compressing
    matrices whose codes spell the number of their group; our bytes in that order are what its product takes."""
    needs_cusparselt()
    weights, metadata, v, out = run_all(library, dtype, (2, 4))
    dense = sparse_semi_structured_to_dense_cutlass(weights, metadata)
    groups = dense.numel() // 4
    number = torch.arange(groups, device="cuda")
    order = torch.zeros(groups, dtype=torch.long, device="cuda")  # which group stands at each place
    for bit in range((groups - 1).bit_length()):
        high = (number >> bit & 1).bool()
        spelled = torch.zeros(groups, 4, dtype=dtype, device="cuda")
        spelled[~high, :2] = 1
        spelled[high, 2:] = 1
        compressed = torch._cslt_compress(spelled.view_as(dense)).contiguous().view(torch.uint8).view(-1)
        order |= (nibbles_of(compressed[weights.numel() * 2 :])[:groups] == 0xE).long() << bit
    assert torch.equal(order.sort().values, number)  # every group once
    theirs = torch._cslt_compress(dense)
    ours = theirs.clone()
    flat = ours.view(torch.uint8).view(-1)
    flat[: weights.numel() * 2] = weights.contiguous().view(torch.uint8).view(-1)
    codes = codes_of(dense)[order].view(-1, 2)
    flat[weights.numel() * 2 :][: groups // 2] = (codes[:, 0] | codes[:, 1] << 4).to(torch.uint8)
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))  # the same bytes as its own compression
    close(out, torch._cslt_sparse_mm(ours, v.t().contiguous().t()))


def test_chain_equals_the_three_functions(library):
    pipeline, _, _, _ = make(library, torch.bfloat16, (2, 4), n=1000)
    pipeline.qk_prune()
    pipeline.softmax()
    pipeline.pv_sparse()
    apart = pipeline.out.clone()
    pipeline.out.fill_(float("nan"))
    pipeline.chain()
    assert torch.equal(apart, pipeline.out)
