"""Times a whole forward pass of a diffusion transformer of Flux's shapes (n = 4608, 24 heads of 128, bf16, random
weights) with pruned attention beside the same model on PyTorch's attention (cuDNN's kernel), in turn in one process.

    python3 -m bench.clients.flux --out bench/results/flux_h200.json --check
    python3 -m bench.clients.flux --forms compiled --patterns 1:2 --out bench/results/flux_compiled_h200.json --check
    python3 -m bench.clients.flux --forms fused graph fp8 --patterns 1:2 --out bench/results/flux_forms_h200.json
    python3 -m bench.clients.flux --forms plain compiled graph --patterns 1:2 --norm-rope --out FILE
    python3 -m bench.clients.flux --model sd3 --forms compiled graph --patterns 1:2 --out bench/results/sd3_h200.json
    python3 -m bench.clients.flux --image-tokens 16384 --forms compiled --out bench/results/flux_2048_h200.json

The model is diffusers' FluxTransformer2DModel where that package is found (--path adds a folder to look in), else the
same shapes from plain PyTorch layers (flux_model.py); --model sd3 is SD3.5-medium's blocks with the same tokens and
heads, some with two attentions. The result says which. Forms, both sides alike: as it is (plain); its blocks compiled
by torch.compile, as diffusers' guide to fast inference has it; compiled with one product for the projections to q, k
and v (fused); that whole pass in a CUDA graph (graph); fused with all large products but attention's in fp8 (fp8).
dspattn.use switches; diffusers' Flux as it is by a backend's name, since a mode that sees every call of PyTorch's takes
time where the host is what limits. One attention call of each shape is timed beside: the result says what they are of
the model's time, and with it the most that any attention could gain; --kernels also lists the time of every kernel on
each side.

--norm-rope adds both sides with queries and keys prepared by dspattn.norm_rope (fuse_norm_rope of
dspattn.integrations.diffusers): a row's four times tell that operator's gain from pruning's. Bar at n = 4608: 1:2 at
least 1.12 times as fast as stock with cuDNN in bf16, by all that was asked for; --check exits 1 below it.
"""

import argparse
import contextlib
import dataclasses
import json
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import dspattn
from bench.clients import diffusion_models
from bench.clients.flux_model import TINY, Shape
from bench.common import results, timing

PATTERNS = ("1:2", "2:4")
FORMS = ("plain", "compiled", "fused", "graph", "fp8")  # each changes what the one before it left
BAR, BAR_TOKENS = {"1:2": 1.12}, Shape().tokens


NORM_ROPE = "norm_rope"


def with_norm_rope(name):
    """Of a contender with queries and keys prepared by dspattn.norm_rope."""
    return NORM_ROPE if name == "stock" else f"{name}, {NORM_ROPE}"


def contenders(forward, device, patterns=PATTERNS, switch=dspattn.use):
    """{name: forward with that attention}."""

    def stock():
        # cuDNN's or none: PyTorch would take another kernel in silence.
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if device == "cuda" else contextlib.nullcontext():
            return forward()

    def pruned(pattern):
        with switch(pattern):
            return forward()

    return {"stock": stock, **{pattern: lambda pattern=pattern: pruned(pattern) for pattern in patterns}}


def attention_alone(shape, tokens, device, dtype, patterns):
    """{name: one attention call of so many tokens}, laid out as the projections leave q, k and v."""
    tensors = [
        torch.randn(1, tokens, shape.heads, shape.head_dim, device=device).to(dtype).transpose(1, 2) for _ in range(3)
    ]
    return contenders(lambda: torch.nn.functional.scaled_dot_product_attention(*tensors), device, patterns)


def limit(model, whole, calls):
    """What attention is of the stock model's time by count, and how fast the model would be if it took none."""
    spent = sum(count * calls[tokens]["stock"]["median_us"] for tokens, count in model.attention.items())
    part = spent / whole["stock"]["median_us"]
    return {"attention_share": round(part, 4), "without_attention": round(1 / (1 - part), 4) if part < 1 else None}


def change(model, form, compiler):
    """Brings the model into a form."""
    if form in ("fused", "graph", "fp8") and model.fuse is not None:
        model.fuse()
        model.fuse = None  # once
    if form == "fp8":
        diffusion_models.use_fp8(model.blocks)
    for block in model.blocks if form != "plain" else []:
        block.compile(fullgraph=True, backend=compiler)


def prepared(model, device, patterns, switch):
    """The same contenders with the model's queries and keys prepared by dspattn.norm_rope."""

    def forward():
        model.norm_rope(True)
        try:
            return model.forward()
        finally:
            model.norm_rope(False)

    of = contenders(forward, device, patterns, switch)
    return {with_norm_rope(name): function for name, function in of.items()}


def measure(
    shape,
    device,
    dtype,
    model,
    repeats,
    patterns=PATTERNS,
    forms=FORMS[:2],
    compiler="inductor",
    kernels=False,
    norm_rope=False,
):
    """The rows of the result, one for each form of the model."""
    torch.manual_seed(0)
    rows = []
    if device == "cuda":
        timing.warm_up()
    with torch.no_grad():
        model = diffusion_models.MODELS[model](shape, device, dtype)
        for form in sorted(forms, key=FORMS.index):
            change(model, form, compiler)
            facts = {
                "model": model.name, "n": shape.tokens, "heads": shape.heads, "d": shape.head_dim,
                "dtype": str(dtype)[6:], "blocks": len(model.blocks), "form": form,
                "attention_calls": {str(tokens): count for tokens, count in model.attention.items()},
            }  # fmt: skip
            rows.append(facts | row(shape, device, dtype, model, form, repeats, patterns, kernels, norm_rope))
            times = {name: found["median_us"] for name, found in rows[-1]["times"].items()}
            print(f"{model.name}, {form}: {times}, {rows[-1]['ratios']}", file=sys.stderr, flush=True)
    return rows


def row(shape, device, dtype, model, form, repeats, patterns, kernels, norm_rope):
    """Times of a forward pass and of attention alone, their ratios, and how far the outputs are apart."""
    switch = model.switch if form == "plain" else dspattn.use
    functions = contenders(model.forward, device, patterns, switch)
    if norm_rope:
        functions |= prepared(model, device, patterns, switch)
    alone = {tokens: attention_alone(shape, tokens, device, dtype, patterns) for tokens in model.attention}
    outs = {name: function().float() for name, function in functions.items()}
    if form == "graph":
        graphs = [timing.Graphed([function]) for function in functions.values()]  # which hold what the graphs read
        functions = {name: graphed.graph.replay for name, graphed in zip(functions, graphs, strict=True)}
    if device == "cuda":
        times = timing.in_turn(functions, repeats)
        calls = {tokens: timing.in_turn(each, 5 * repeats) for tokens, each in alone.items()}
    else:
        times = timing.in_turn_on_cpu(functions, 0.0, "wall")
        calls = {tokens: timing.in_turn_on_cpu(each, 0.0, "wall") for tokens, each in alone.items()}
    reference, main = outs["stock"].norm(), calls[shape.tokens]
    others = [name for name in times if name != "stock"]
    found = {
        "times": times, "attention_times": main, **limit(model, times, calls),
        "attention_ratios": {p: round(main["stock"]["median_us"] / main[p]["median_us"], 4) for p in patterns},
        "ratios": {name: round(times["stock"]["median_us"] / times[name]["median_us"], 4) for name in others},
        "relative_difference": {
            name: round(float((outs[name] - outs["stock"]).norm() / reference), 5) for name in others
        },
    }  # fmt: skip
    if kernels:
        found["kernels"] = {name: kernel_times(function, device) for name, function in functions.items()}
    return found


def kernel_times(function, device):
    """[kernel, its launches, microseconds together] of one call, longest first."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if device == "cuda" else activity.CPU]) as profile:
        function()
        if device == "cuda":
            torch.cuda.synchronize()
    own = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    events = [(event.key[:120], event.count, round(getattr(event, own), 1)) for event in profile.key_averages()]
    return sorted((event for event in events if event[2] > 0), key=lambda event: -event[2])


def found_diffusers():
    try:
        import diffusers  # noqa: F401
    except Exception as error:  # whatever a package for another torch raises when it is imported
        print(f"diffusers is not used: {error}", file=sys.stderr)
        return False
    return True


def main(arguments=None):
    parser = argparse.ArgumentParser(description="A whole forward pass of Flux's shapes, pruned and not.")
    parser.add_argument("--out", help="result file; default: standard output")
    parser.add_argument("--model", choices=sorted(diffusion_models.MODELS), help="default: diffusers, if found")
    parser.add_argument("--path", help="a folder with the diffusers package")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of toy size, for trying the program")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--image-tokens", type=int, help="default: 4096, an image of 1024 x 1024 pixels")
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=PATTERNS, help="default: both")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS[:2], help="default: plain, compiled")
    parser.add_argument("--kernels", action="store_true", help="add the time of every kernel of one pass")
    parser.add_argument("--norm-rope", action="store_true", help="add both sides prepared by dspattn.norm_rope")
    parser.add_argument("--check", action="store_true", help="exit 1 below the bar")
    given = parser.parse_args(arguments)
    if given.path:
        sys.path.insert(0, given.path)
    model = given.model or ("diffusers" if found_diffusers() else "plain")
    shape = TINY if given.tiny else Shape()
    if given.image_tokens is not None:
        if given.image_tokens < 1:
            parser.error(f"--image-tokens: expected a positive number, got {given.image_tokens}")
        shape = dataclasses.replace(shape, image_tokens=given.image_tokens)
    if given.device == "cpu" and "graph" in given.forms:
        parser.error("--forms: expected none of graph with --device cpu, got graph")
    if given.norm_rope and model != "diffusers":
        parser.error(f"--norm-rope: expected diffusers' model of Flux, got {model}")
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    # A compiler of toys would take longer than all the rest: they are traced alone.
    compiler = "eager" if given.tiny else "inductor"
    rows = measure(
        shape,
        given.device,
        dtype,
        model,
        given.repeats,
        given.patterns,
        given.forms,
        compiler,
        given.kernels,
        given.norm_rope,
    )
    facts = results.gpu() if given.device == "cuda" else results.cpu()
    if given.out:
        results.write(given.out, facts, rows)
    else:
        print(json.dumps({**facts, "rows": rows}, indent=1))
    in_bf16 = [row for row in rows if row["form"] != "fp8"]
    best = {
        pattern: max(
            (row["ratios"][with_norm_rope(pattern) if given.norm_rope else pattern] for row in in_bf16), default=0
        )
        for pattern in BAR
        if pattern in given.patterns
    }
    missed = [pattern for pattern in best if best[pattern] < BAR[pattern] and shape.tokens == BAR_TOKENS]
    for pattern in missed:
        print(f"{pattern}: {best[pattern]} times stock, bar {BAR[pattern]}", file=sys.stderr)
    return 1 if given.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
