"""The library's forward on torch tensors, through ctypes: what the benchmarks of this folder time.

The shared object is the one built from bench/fused_shim.cpp (CMake target dspattn_bench_shim); DSPATTN_BENCH_LIBRARY
names it where the caller gives none. Several builds can be loaded at once.
"""

import ctypes
import functools
import os

import torch

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int32: 3, torch.bool: 4, torch.uint8: 4}


class View(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
        ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]


class Call(ctypes.Structure):
    _fields_ = (
        [(name, View) for name in ("q", "k", "v", "out", "lse", "key_lengths", "allowed", "bias", "cu_q", "cu_k")]
        + [(name, ctypes.c_int64) for name in ("max_q", "max_k", "window_left", "window_right")]
        + [("scale", ctypes.c_double), ("stream", ctypes.c_void_p)]
        + [("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_int64)]
        + [(name, ctypes.c_int32) for name in ("keep", "group", "consecutive", "causal", "top_left")]
    )


def view(tensor):
    result = View()
    if tensor is not None:
        result.data, result.rank, result.dtype = tensor.data_ptr(), tensor.dim(), DTYPES[tensor.dtype]
        for i in range(tensor.dim()):
            result.shape[i], result.stride[i] = tensor.shape[i], tensor.stride(i)
    return result


@functools.cache
def library(path=None):
    path = path or os.environ["DSPATTN_BENCH_LIBRARY"]
    return ctypes.CDLL(os.path.abspath(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)


def prepare(
    q,
    k,
    v,
    *,
    pattern=(2, 4),
    grouping="interleaved",
    causal=False,
    top_left=False,
    window=(-1, -1),
    key_lengths=None,
    allowed=None,
    bias=None,
    cu_q=None,
    cu_k=None,
    max_q=0,
    max_k=0,
    scale=0.0,
    out=None,
    lse=True,
    path=None,
):
    """Returns (run, out, lse): `run()` enqueues the forward on the current stream and allocates nothing.

    `path` names the build to call.
    """
    shape = q.shape[:3] + v.shape[3:]
    out = torch.empty(shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if lse else None
    call = Call()
    for name, tensor in (
        ("q", q),
        ("k", k),
        ("v", v),
        ("out", out),
        ("lse", lse),
        ("key_lengths", key_lengths),
        ("allowed", allowed),
        ("bias", bias),
        ("cu_q", cu_q),
        ("cu_k", cu_k),
    ):
        setattr(call, name, view(tensor))
    call.max_q, call.max_k, call.window_left, call.window_right = max_q, max_k, *window
    call.scale, call.keep, call.group = scale, *pattern
    call.consecutive, call.causal, call.top_left = grouping == "consecutive", causal, top_left
    message = ctypes.create_string_buffer(4096)
    function, reference = library(path).dspattn_bench_forward, ctypes.byref(call)
    bytes_needed = ctypes.c_int64()
    if library(path).dspattn_bench_workspace(reference, ctypes.byref(bytes_needed), message, len(message)):
        raise RuntimeError(message.value.decode())
    call.workspace_bytes = bytes_needed.value
    workspace = torch.empty(bytes_needed.value, dtype=torch.uint8, device=q.device) if bytes_needed.value else None
    call.workspace = workspace.data_ptr() if workspace is not None else None
    keep_alive = (q, k, v, out, lse, key_lengths, allowed, bias, cu_q, cu_k, workspace)

    def run(_keep_alive=keep_alive):
        call.stream = torch.cuda.current_stream().cuda_stream
        if function(reference, message, len(message)):
            raise RuntimeError(message.value.decode())

    return run, out, lse
