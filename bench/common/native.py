"""The library on torch tensors, through ctypes: what the benchmarks time.

The shared object is the one built from bench/common/shim*.cpp (CMake target dspattn_bench_shim); DSPATTN_BENCH_LIBRARY
names it where the caller gives none, and without it build/release/bench is looked into. Several builds can be loaded at
once.
"""

import ctypes
import functools
import os

import torch

from bench.common.results import ROOT

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int32: 3, torch.bool: 4, torch.uint8: 4}
MESSAGE_BYTES = 4096
WORKSPACE_ALIGNMENT = 256  # that the library asks for; torch's memory on the CPU has 64


class View(ctypes.Structure):
    """Mirror of struct View in shim.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
        ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]


class Call(ctypes.Structure):
    """Mirror of struct Call in shim.h."""

    _fields_ = (
        [(name, View) for name in ("q", "k", "v", "out", "lse", "key_lengths", "allowed", "bias", "cu_q", "cu_k")]
        + [(name, ctypes.c_int64) for name in ("max_q", "max_k", "window_left", "window_right")]
        + [("scale", ctypes.c_double), ("stream", ctypes.c_void_p)]
        + [("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_int64)]
        + [(name, ctypes.c_int32) for name in ("keep", "group", "consecutive", "causal", "top_left", "device")]
        + [(name, View) for name in ("counts", "columns")]
        + [(name, ctypes.c_void_p) for name in ("nonzeros", "metadata")]
        + [(name, ctypes.c_int32) for name in ("block", "rest_mean", "shared_choice")]
        + [("kernel", ctypes.c_char * 64)]
        + [(name, View) for name in ("block_table", "d_out", "d_q", "d_k", "d_v", "d_lse", "d_bias")]
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
    path = path or os.environ.get("DSPATTN_BENCH_LIBRARY") or ROOT / "build/release/bench/libdspattn_bench_shim.so"
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such library; build the target dspattn_bench_shim")
    return ctypes.CDLL(os.path.abspath(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)


def call_of(
    tensors,
    *,
    pattern=(2, 4),
    grouping="interleaved",
    causal=False,
    top_left=False,
    window=(-1, -1),
    scale=0.0,
    rest="drop",
    choice="each_head",
    kernel="",
):
    """A call on named tensors, any of them None; all on one device, the stream set when it runs."""
    call = Call()
    for name, tensor in tensors.items():
        setattr(call, name, view(tensor))
    device = tensors["q"].device
    call.device = (device.index or 0) if device.type == "cuda" else -1
    (call.window_left, call.window_right), call.scale = window, scale
    call.keep, call.group = pattern
    call.consecutive, call.causal, call.top_left = grouping == "consecutive", causal, top_left
    call.rest_mean, call.shared_choice, call.kernel = rest == "mean", choice == "shared", kernel.encode()
    return call


def invoke(path, name, call, *more):
    """Calls dspattn_bench_<name>(call, *more, message, its size); raises what it reports."""
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    if getattr(library(path), f"dspattn_bench_{name}")(ctypes.byref(call), *more, message, len(message)):
        raise RuntimeError(message.value.decode())


def prepared(path, name, call, keep_alive):
    """A function that enqueues the call on the current stream and allocates nothing."""
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    function, reference, on_gpu = getattr(library(path), f"dspattn_bench_{name}"), ctypes.byref(call), call.device >= 0

    def run(_keep_alive=keep_alive):
        call.stream = torch.cuda.current_stream().cuda_stream if on_gpu else None
        if function(reference, message, len(message)):
            raise RuntimeError(message.value.decode())

    return run


def aligned_bytes(size, device):
    """Memory for a workspace."""
    memory = torch.empty(size + WORKSPACE_ALIGNMENT - 1, dtype=torch.uint8, device=device)
    begin = -memory.data_ptr() % WORKSPACE_ALIGNMENT
    return memory[begin : begin + size]


def with_workspace(path, name, call, device):
    """Gives the call the workspace that it asks for; returns its memory."""
    bytes_needed = ctypes.c_int64()
    invoke(path, name, call, ctypes.byref(bytes_needed))
    workspace = aligned_bytes(bytes_needed.value, device) if bytes_needed.value else None
    call.workspace_bytes = bytes_needed.value
    call.workspace = workspace.data_ptr() if workspace is not None else None
    return workspace


def prepare(
    q,
    k,
    v,
    *,
    key_lengths=None,
    allowed=None,
    bias=None,
    cu_q=None,
    cu_k=None,
    max_q=0,
    max_k=0,
    block_table=None,
    out=None,
    lse=True,
    path=None,
    **options,
):
    """Returns (run, out, lse) of a forward call: `run()` enqueues it on the current stream and allocates nothing.

    `options` are those of call_of; `path` names the build to call.
    """
    out = torch.empty(q.shape[:3] + v.shape[3:], dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if lse else None
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "key_lengths": key_lengths}
    tensors |= {"allowed": allowed, "bias": bias, "cu_q": cu_q, "cu_k": cu_k, "block_table": block_table}
    call = call_of(tensors, **options)
    call.max_q, call.max_k = max_q, max_k
    workspace = with_workspace(path, "workspace", call, q.device)
    return prepared(path, "forward", call, (tensors, workspace)), out, lse


def prepare_backward(q, k, v, out, lse, d_out, *, max_q=0, max_k=0, path=None, tensors=None, **options):
    """Returns (run, d_q, d_k, d_v) of a backward call on the results of a forward one.

    `tensors` are masks and lengths by their names in Call; `options` are those of call_of.
    """
    gradients = {name: torch.empty_like(like) for name, like in (("d_q", q), ("d_k", k), ("d_v", v))}
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "d_out": d_out, **(tensors or {}), **gradients}
    call = call_of(given, **options)
    call.max_q, call.max_k = max_q, max_k
    workspace = with_workspace(path, "backward_workspace", call, q.device)
    return prepared(path, "backward", call, (given, workspace)), *gradients.values()
