"""Other libraries' ways to cut a sequence, around attention that prunes: PyTorch's, Accelerate's, DeepSpeed's."""

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


def under_ulysses(group, rank):
    """DeepSpeed's DistributedAttention takes any function of [batch, rows, heads, d]; rows are one stretch a rank."""
    import deepspeed.comm
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 600, 4, 16) for _ in range(3))

    def local(q, k, v, *rest):
        out = dspattn.attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return out.transpose(1, 2).contiguous()

    whole = q.clone().requires_grad_()
    wanted = local(whole, k, v)
    wanted.backward(torch.ones_like(wanted))
    mine = slice(rank * 300, rank * 300 + 300)
    piece = q[:, mine].clone().requires_grad_()
    layer = DistributedAttention(local, group, scatter_idx=2, gather_idx=1)
    out = layer(piece, k[:, mine].contiguous(), v[:, mine].contiguous(), 0)
    out.backward(torch.ones_like(out))
    torch.testing.assert_close(out, wanted[:, mine])
    torch.testing.assert_close(piece.grad, whole.grad[:, mine])
    return True
