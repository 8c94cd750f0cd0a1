"""The pipeline's functions on PyTorch tensors: one problem, its sparse matrices and its results."""

import ctypes

import torch

from bench.common import native

STAGES = ("qk_prune", "softmax", "pv_sparse", "pipeline")


def padded(count):
    return (count + 255) // 256 * 256


class Pipeline:
    """One problem: q, k, v contiguous [batch, heads, n, d] on one device; blocks = (block, counts, columns) or None.

    qk_prune, softmax and pv_sparse run one stage each, chain all three.
    """

    def __init__(self, path, q, k, v, pattern=(2, 4), interleaved=False, causal=False, blocks=None):
        batch, heads, n_q, _ = q.shape
        self.out = torch.empty(batch, heads, n_q, v.shape[3], dtype=q.dtype, device=q.device)
        self.lse = torch.empty(batch, heads, n_q, dtype=torch.float32, device=q.device)
        block, counts, columns = blocks or (0, None, None)
        tensors = {"q": q, "k": k, "v": v, "out": self.out, "lse": self.lse, "counts": counts, "columns": columns}
        grouping = "interleaved" if interleaved else "consecutive"
        call = native.call_of(tensors, pattern=pattern, grouping=grouping, causal=causal)
        call.block = block
        nonzeros, metadata = ctypes.c_int64(), ctypes.c_int64()
        native.invoke(path, "sparse_bytes", call, ctypes.byref(nonzeros), ctypes.byref(metadata))
        # One buffer for both, so that the chain can use it as its workspace.
        start = padded(nonzeros.value)
        workspace = native.aligned_bytes(start + padded(metadata.value), q.device)
        call.workspace, call.workspace_bytes = workspace.data_ptr(), workspace.numel()
        call.nonzeros, call.metadata = workspace.data_ptr(), workspace.data_ptr() + start
        rows = (n_q + 31) // 32 * 32
        self.nonzeros = workspace[: nonzeros.value].view(q.dtype).view(batch, heads, rows, -1)
        self.metadata = workspace[start : start + metadata.value].view(torch.int16).view(batch, heads, rows, -1)
        self.qk_prune, self.softmax, self.pv_sparse, self.chain = (
            native.prepared(path, stage, call, (tensors, workspace)) for stage in STAGES
        )
