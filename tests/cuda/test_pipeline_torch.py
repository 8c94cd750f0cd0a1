"""The pipeline's nonzeros and metadata in PyTorch's own semi-structured products.

Needs a CUDA GPU, torch and the built library (DSPATTN_BUILD, default build); skipped otherwise.
"""

import os
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

import pipeline_lib  # noqa: E402
from torch.sparse._semi_structured_conversions import (  # noqa: E402
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)


@pytest.fixture(scope="module")
def library():
    try:
        return pipeline_lib.load(os.environ.get("DSPATTN_BUILD", ROOT / "build"))
    except FileNotFoundError as error:
        pytest.skip(str(error))


def make(library, dtype, pattern, n=256, d=64, batch=1, heads=2, integers=False):
    torch.manual_seed(3)
    shape = (batch, heads, n, d)
    if integers:
        q, k = (torch.randint(-2, 3, shape, device="cuda").to(dtype) for _ in range(2))
    else:
        q, k = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
    v = torch.randn(shape, device="cuda").to(dtype)
    return pipeline_lib.Pipeline(library, q, k, v, pattern), q, k, v


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


@pytest.mark.parametrize("dtype,pattern", [(torch.bfloat16, (2, 4)), (torch.float16, (2, 4)), (torch.float32, (1, 2))])
def test_torchs_sparse_gemm_gives_the_same_product(library, dtype, pattern):
    pipeline, _, _, v = make(library, dtype, pattern)
    pipeline.qk_prune()
    pipeline.softmax()
    pipeline.pv_sparse()
    for head in range(2):
        try:
            theirs = torch._sparse_semi_structured_mm(
                pipeline.nonzeros[0, head], pipeline.metadata[0, head], v[0, head].t().contiguous().t()
            )
        except RuntimeError as error:
            pytest.skip(f"this PyTorch has no such product: {str(error).splitlines()[0]}")
        tolerance = 1e-3 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(pipeline.out[0, head], theirs, rtol=tolerance, atol=tolerance)


def test_chain_equals_the_three_functions(library):
    pipeline, _, _, _ = make(library, torch.bfloat16, (2, 4), n=1000)
    pipeline.qk_prune()
    pipeline.softmax()
    pipeline.pv_sparse()
    apart = pipeline.out.clone()
    pipeline.out.fill_(float("nan"))
    pipeline.chain()
    assert torch.equal(apart, pipeline.out)
