"""Random problems cut over ranks: drawn from a seed, computed on a rank, computed whole."""

from __future__ import annotations

import random

import torch

import dspattn
from dspattn import parallel

GRADIENTS = ("out", "lse", "d_q", "d_k", "d_v")


def draw(seed):
    """A problem as a dictionary of numbers and names. Neighbouring seeds go through what every promise names."""
    r = random.Random(seed)
    kv_heads = r.choice([1, 2, 3])
    problem = {
        "seed": seed,
        "world": 1 + seed // 8 % 4,
        "method": ["ring", "all_to_all"][seed % 2],
        "pattern": r.choice(["2:4", "2:4", "1:2", "dense", "1:4", "4:8"]),
        "grouping": ["interleaved", "consecutive"][seed // 2 % 2],
        "dtype": r.choice(["float32", "float32", "bfloat16", "float16"]),
        "is_causal": seed // 4 % 2 == 0,
        "window": (r.randint(0, 300), r.choice([None, r.randint(0, 100)])) if r.random() < 0.2 else None,
        "heads": kv_heads * r.choice([1, 1, 2, 3]),
        "kv_heads": kv_heads,
        "d": r.choice([4, 8, 16, 20]),
        "d_v": r.choice([4, 8, 24]),
        "integers": r.random() < 0.3,
        "scale": 0.25 if r.random() < 0.3 else None,
        "block": 128,
        "balanced": r.random() < 0.85,
        "fp32": r.random() < 0.15,
        "masks": [],
    }
    if problem["grouping"] == "consecutive" and r.random() < 0.2:
        problem.update(pattern="2:5", block=60)
    if r.random() < 0.3:
        problem["lengths"] = [r.choice([0, 1, 5, 130, 300, 900, r.randint(1, 700)]) for _ in range(r.randint(1, 5))]
        problem["batch"] = 1
    else:
        problem["n_k"] = r.choice([0, 1, 100, 128, 256, 384, 700, 1024, *(r.randint(1, 1000) for _ in range(6))])
        problem["n_q"] = problem["n_k"] if r.random() < 0.7 else r.randint(0, 600)
        problem["batch"] = r.choice([1, 1, 2])
        problem["alignment"] = r.choice(["top_left", "bottom_right"])
        problem["offset"] = r.randint(-200, 200) if r.random() < 0.2 else 0
        problem["masks"] = [name for name in ("lengths", "allowed", "bias") if r.random() < 0.12]
        problem["rows"] = r.choice(["one", "all"])
    return problem


def tensors_of(problem):
    """q, k, v and the gradient of the result, whole."""
    generator = torch.Generator().manual_seed(problem["seed"])
    dtype, device = getattr(torch, problem["dtype"]), problem.get("device", "cpu")

    def values(heads, rows, width, integers):
        shape = (problem["batch"], heads, rows, width) if "lengths" not in problem else (rows, heads, width)
        if integers:
            return torch.randint(-2, 3, shape, generator=generator).to(device, dtype)
        return torch.randn(shape, generator=generator).to(device, dtype)

    total = sum(problem["lengths"]) if "lengths" in problem else None
    n_q, n_k = (total, total) if total is not None else (problem["n_q"], problem["n_k"])
    heads, kv_heads, d, d_v = (problem[name] for name in ("heads", "kv_heads", "d", "d_v"))
    q = values(heads, n_q, d, problem["integers"])
    k = values(kv_heads, n_k, d, problem["integers"])
    v = values(kv_heads, n_k, d_v, False)
    d_out = values(heads, n_q, d_v, False).float() if problem["fp32"] else values(heads, n_q, d_v, False)
    return q, k, v, d_out


def masks_of(problem):
    """key_lengths, the boolean mask and the bias, whole."""
    generator = torch.Generator().manual_seed(problem["seed"] + 1)
    masks = {}
    if "lengths" in problem:
        return masks
    rows = 1 if problem["rows"] == "one" else problem["n_q"]
    shape = (problem["batch"], problem["heads"], rows, problem["n_k"])
    if "lengths" in problem["masks"]:
        masks["key_lengths"] = torch.randint(0, problem["n_k"] + 1, (problem["batch"],), generator=generator)
    if "allowed" in problem["masks"]:
        masks["attn_mask"] = torch.rand(shape, generator=generator) < 0.7
    if "bias" in problem["masks"]:
        masks["attn_bias"] = torch.randint(-4, 5, (1, 1, *shape[2:]), generator=generator).float() / 4
    return {name: mask.to(problem.get("device", "cpu")) for name, mask in masks.items()}


def options_of(problem):
    names = ("pattern", "grouping", "is_causal", "window", "scale", "alignment", "offset", "allow_tf32")
    options = {name: problem[name] for name in names if name in problem}
    if problem["fp32"]:
        options["out_dtype"] = torch.float32
    return {**options, "return_lse": True}


def layouts_of(problem):
    """Of queries and keys; None where the default is meant."""
    cut = {"block": problem["block"], "balanced": problem["balanced"]}
    if "lengths" in problem:
        layout = parallel.layout_of(problem["lengths"], problem["world"], **cut)
        return layout, layout
    return tuple(parallel.layout_of(problem[n], problem["world"], **cut) for n in ("n_q", "n_k"))


def whole(problem):
    q, k, v, d_out = tensors_of(problem)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    options = options_of(problem)
    if "lengths" in problem:
        cu = torch.tensor([0, *problem["lengths"]], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(q.device)
        out, lse = dspattn.varlen_attention(q, k, v, cu, cu, **options)
    else:
        out, lse = dspattn.attention(q, k, v, enable_gqa=True, **options, **masks_of(problem))
    grads = torch.autograd.grad(out, (q, k, v), d_out)
    return [t.detach().float().cpu() for t in (out, lse, *grads)]


def on_rank(group, rank, problem):
    """This rank's rows of the five results."""
    queries, keys = layouts_of(problem)
    dim = 0 if "lengths" in problem else 2
    q, k, v, d_out = tensors_of(problem)
    q, d_out = (parallel.shard(t, dim, group, layout=queries) for t in (q, d_out))
    k, v = (parallel.shard(t, dim, group, layout=keys) for t in (k, v))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    plain = problem["block"] == 128 and problem["balanced"]
    options = {**options_of(problem), "group": group, "method": problem["method"]}
    if "lengths" in problem:
        cu = [0]
        for length in problem["lengths"]:
            cu.append(cu[-1] + length)
        options["layout"] = None if plain else queries
        out, lse = parallel.varlen_attention(q, k, v, cu, **options)
    else:
        masks = masks_of(problem)
        for name in ("attn_mask", "attn_bias"):
            if name in masks and masks[name].shape[2] != 1:
                masks[name] = parallel.shard(masks[name], 2, group, layout=queries)
        options["layout"] = None if plain else queries
        out, lse = parallel.attention(q, k, v, enable_gqa=True, **options, **masks)
    grads = torch.autograd.grad(out, (q, k, v), d_out)
    return [t.detach().float().cpu().numpy() for t in (out, lse, *grads)]


def many_on_rank(group, rank, problems):
    return [on_rank(group, rank, problem) for problem in problems]


def joined(problem, pieces):
    """The five results whole, from every rank's."""
    queries, keys = layouts_of(problem)
    packed = "lengths" in problem
    dims = (0, 1, 0, 0, 0) if packed else (2, 2, 2, 2, 2)
    layouts = (queries, queries, queries, keys, keys)
    return [
        torch.cat([torch.from_numpy(piece[i]) for piece in pieces], dim).index_select(dim, layout.inverse())
        for i, (dim, layout) in enumerate(zip(dims, layouts, strict=True))
    ]


def difference(problem, ours, wanted):
    """The largest difference as a multiple of what is allowed: 1e-5 of the largest number for fp32; 16-bit results are
    roundings of nearly the same number, a unit in the last place apart at most, and of the gradients of q and k a part
    comes from the rounded result."""
    unit = {"float32": 0.0, "bfloat16": 2.0**-7, "float16": 2.0**-10}[problem["dtype"]]
    worst = {}
    for name, result, expected in zip(GRADIENTS, ours, wanted, strict=True):
        if result.shape != expected.shape or not torch.equal(result.isinf(), expected.isinf()):
            return {name: float("inf")}
        if result.numel() == 0:
            continue
        finite = ~expected.isinf()
        result, expected = result[finite], expected[finite]
        if result.numel() == 0:
            continue
        own = 0.0 if name == "lse" or (name == "out" and problem["fp32"]) else unit
        largest = expected.abs().max()
        allowed = 1e-5 * expected.abs().max().clamp(min=1.0 if name == "lse" else 1e-6) + own * expected.abs()
        if name in ("d_q", "d_k"):
            allowed = allowed + 0.25 * own * largest
        worst[name] = float(((result - expected).abs() / allowed).max())
    return worst


def plain_problem(seed, **given):
    """A problem without masks, windows and shared heads, for which :func:`errors` has a reference."""
    drawn = draw(seed)
    kept = ("seed", "world", "method", "grouping", "is_causal", "block", "balanced", "masks", "fp32")
    problem = {name: drawn[name] for name in kept}
    problem |= {"pattern": "2:4", "heads": 2, "kv_heads": 2, "d": 16, "d_v": 16, "integers": False, "scale": None}
    problem |= {"batch": 1, "n_q": 300, "n_k": 300, "alignment": "top_left", "offset": 0, "window": None, "rows": "one"}
    if "lengths" in given:
        problem = {name: value for name, value in problem.items() if name not in ("n_q", "n_k", "alignment", "offset")}
    return problem | {"block": 128, "balanced": True, "masks": [], "fp32": False} | given


def errors(problem, ours):
    """By name, the largest error of the results and that of the same computation in plain low precision, both against
    float64 on the keys that one process keeps."""
    q, k, v, d_out = (t.cpu() for t in tensors_of(problem))
    names = ("pattern", "grouping", "is_causal", "scale")
    device = problem.get("device", "cpu")
    weights = dspattn.attention_weights(
        q.to(device), k.to(device), out_dtype=torch.float32, **{name: problem[name] for name in names}
    )
    kept = weights.cpu() > 0
    exact, plain = (_with_selection(q, k, v, d_out, kept, dtype) for dtype in (torch.float64, q.dtype))
    of_ours = [ours[i] for i in (0, 2, 3, 4)]  # the LSE is float32, whatever the inputs
    found = {}
    for name, wanted, low, result in zip(("out", "d_q", "d_k", "d_v"), exact, plain, of_ours, strict=True):
        found[name] = tuple(float((part.double() - wanted).abs().max()) for part in (result, low))
    return found


def _with_selection(q, k, v, d_out, kept, dtype):
    leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
    scores = leaves[0] @ leaves[1].transpose(-1, -2) * q.shape[-1] ** -0.5
    out = torch.softmax(scores.masked_fill(~kept, float("-inf")), -1) @ leaves[2]
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(dtype))]
