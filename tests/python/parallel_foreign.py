"""PyTorch's own context_parallel around calls that go parallel here."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel

import dspattn
from dspattn import parallel


def under_context_parallel(group, rank):
    """Its buffers are cut as ours are, where the length divides by 256 ranks: two chunks each, from head and tail."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 2, 1024, 16) for _ in range(3))
    wanted = dspattn.attention(q, k, v, is_causal=True)
    mesh = DeviceMesh.from_group(group, "cpu")
    pieces = [t.clone() for t in (q, k, v)]
    with context_parallel(mesh, buffers=pieces, buffer_seq_dims=[2, 2, 2]):
        cut_alike = all(torch.equal(t, parallel.shard(w, 2, group)) for t, w in zip(pieces, (q, k, v), strict=True))
        with parallel.context(group):  # as models do that name a dspattn attention
            out = dspattn.attention(*pieces, is_causal=True)
    joined = parallel.unshard(out, 2, group)
    return cut_alike, float((joined - wanted).abs().max())
