"""The pipeline's C interface (bench/pipeline_c.cpp) on PyTorch tensors, through ctypes."""

import ctypes
import pathlib

import torch

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_INTS_FIRST = [
    "device", "dtype", "keep", "group", "interleaved", "causal",
    "batch", "heads", "n_q", "n_k", "d", "d_v", "block", "width",
]  # fmt: skip
_POINTERS = ["q", "k", "v", "out", "lse", "nonzeros", "metadata", "counts", "columns", "workspace", "stream"]


class Call(ctypes.Structure):
    """Mirror of struct Call in pipeline_c.cpp."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in _INTS_FIRST]
        + [(name, ctypes.c_void_p) for name in _POINTERS]
        + [("workspace_bytes", ctypes.c_int64)]
    )


def load(build_dir):
    """The shared library that the build put under build_dir."""
    found = sorted(pathlib.Path(build_dir).rglob("libdspattn_pipeline_c.so"))
    if not found:
        raise FileNotFoundError(f"no libdspattn_pipeline_c.so under {build_dir}: build the target dspattn_pipeline_c")
    library = ctypes.CDLL(str(found[0]))
    for name in ("qk_prune", "softmax", "pv_sparse", "chain"):
        function = getattr(library, f"pipeline_{name}")
        function.argtypes = [ctypes.POINTER(Call)]
        function.restype = ctypes.c_char_p
    for name in ("nonzeros_bytes", "metadata_bytes"):
        function = getattr(library, f"pipeline_{name}")
        function.argtypes = [ctypes.POINTER(Call)]
        function.restype = ctypes.c_int64
    return library


class Pipeline:
    """One problem: q, k, v contiguous [batch, heads, n, d] on one device; blocks = (block, counts, columns) or None."""

    def __init__(self, library, q, k, v, pattern=(2, 4), interleaved=False, causal=False, blocks=None):
        self.library = library
        self.keep_alive = (q, k, v, blocks)
        batch, heads, n_q, d = q.shape
        n_k, d_v = v.shape[2], v.shape[3]
        self.call = Call(
            device=q.device.index if q.is_cuda else -1, dtype=DTYPES[q.dtype], keep=pattern[0], group=pattern[1],
            interleaved=int(interleaved), causal=int(causal), batch=batch, heads=heads, n_q=n_q, n_k=n_k, d=d, d_v=d_v,
            q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(),
        )  # fmt: skip
        if blocks is not None:
            block, counts, columns = blocks
            self.call.block, self.call.width = block, columns.shape[1]
            self.call.counts, self.call.columns = counts.data_ptr(), columns.data_ptr()
        if q.is_cuda:
            self.call.stream = torch.cuda.current_stream().cuda_stream
        self.rows = (n_q + 31) // 32 * 32
        nonzeros_bytes = library.pipeline_nonzeros_bytes(self.call)
        metadata_bytes = library.pipeline_metadata_bytes(self.call)
        # One buffer for both, so that the chain can use it as its workspace.
        padded = (nonzeros_bytes + 255) // 256 * 256
        self.workspace = torch.empty(padded + (metadata_bytes + 255) // 256 * 256, dtype=torch.uint8, device=q.device)
        self.call.workspace, self.call.workspace_bytes = self.workspace.data_ptr(), self.workspace.numel()
        self.call.nonzeros, self.call.metadata = self.workspace.data_ptr(), self.workspace.data_ptr() + padded
        self.nonzeros = self.workspace[:nonzeros_bytes].view(q.dtype).view(batch, heads, self.rows, -1)
        self.metadata = (
            self.workspace[padded : padded + metadata_bytes].view(torch.int16).view(batch, heads, self.rows, -1)
        )
        self.out = torch.empty(batch, heads, n_q, d_v, dtype=q.dtype, device=q.device)
        self.lse = torch.empty(batch, heads, n_q, dtype=torch.float32, device=q.device)
        self.call.out, self.call.lse = self.out.data_ptr(), self.lse.data_ptr()

    def _run(self, name):
        message = getattr(self.library, f"pipeline_{name}")(self.call)
        if message is not None:
            raise RuntimeError(message.decode())

    def qk_prune(self):
        self._run("qk_prune")

    def softmax(self):
        self._run("softmax")

    def pv_sparse(self):
        self._run("pv_sparse")

    def chain(self):
        self._run("chain")
