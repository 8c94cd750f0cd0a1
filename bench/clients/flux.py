"""Times a whole forward pass of a diffusion transformer of Flux's shapes (n = 4608, 24 heads of 128, bf16, random
weights) with pruned attention beside the same model on PyTorch's attention (cuDNN's kernel), in turn in one process.

    python3 -m bench.clients.flux --out bench/results/flux_h200.json --check
    python3 -m bench.clients.flux --forms compiled --patterns 1:2 --out bench/results/flux_compiled_h200.json --check
    python3 -m bench.clients.flux --image-tokens 16384 --forms compiled --out bench/results/flux_2048_h200.json

The model is diffusers' FluxTransformer2DModel where that package is found (--path adds a folder to look in), else the
same shapes from plain PyTorch layers (flux_model.py); the result says which. It is timed as it is and with its blocks
compiled by torch.compile, as diffusers' guide to fast inference has it, both sides alike. Switched by dspattn.use,
nothing else changes. One attention call of that shape is timed beside: the result says what it is of the model's time,
and with it the most that any attention could gain. Bar at n = 4608: 1:2 at least 1.12 times as fast as cuDNN, compiled
or not; --check exits 1 below it. The last command is the same model at 2048 x 2048 pixels, where attention is more of
the work.
"""

import argparse
import contextlib
import dataclasses
import json
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import dspattn
from bench.clients.flux_model import TINY, Shape, Transformer
from bench.common import results, timing

PATTERNS = ("1:2", "2:4")
FORMS = ("plain", "compiled")
BAR, BAR_TOKENS = {"1:2": 1.12}, Shape().tokens


def plain(shape, device, dtype):
    """(forward, its blocks, what it is) of the model in flux_model.py."""
    with torch.device(device):
        model = Transformer(shape).to(dtype).eval()
        inputs = (
            torch.randn(1, shape.image_tokens, shape.image_channels, dtype=dtype),
            torch.randn(1, shape.text_tokens, shape.text_channels, dtype=dtype),
            torch.randn(1, shape.pooled_channels, dtype=dtype),
        )
    return lambda: model(*inputs), [*model.joint, *model.single], "plain PyTorch layers"


def from_diffusers(shape, device, dtype):
    """The same of diffusers' own model."""
    import diffusers

    rope = [shape.head_dim // 8, shape.head_dim * 7 // 16, shape.head_dim * 7 // 16]
    with torch.device(device):
        model = diffusers.FluxTransformer2DModel(
            num_layers=shape.joint_blocks, num_single_layers=shape.single_blocks, attention_head_dim=shape.head_dim,
            num_attention_heads=shape.heads, in_channels=shape.image_channels, axes_dims_rope=rope,
            joint_attention_dim=shape.text_channels, pooled_projection_dim=shape.pooled_channels,
        ).to(dtype).eval()  # fmt: skip
        inputs = {
            "hidden_states": torch.randn(1, shape.image_tokens, shape.image_channels, dtype=dtype),
            "encoder_hidden_states": torch.randn(1, shape.text_tokens, shape.text_channels, dtype=dtype),
            "pooled_projections": torch.randn(1, shape.pooled_channels, dtype=dtype),
            "timestep": torch.ones(1, dtype=dtype),
            "img_ids": torch.rand(shape.image_tokens, 3),
            "txt_ids": torch.zeros(shape.text_tokens, 3),
        }
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    return lambda: model(**inputs, return_dict=False)[0], blocks, f"diffusers {diffusers.__version__}"


def contenders(forward, device, patterns=PATTERNS):
    """{name: forward with that attention}."""

    def stock():
        # cuDNN's or none: PyTorch would take another kernel in silence.
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if device == "cuda" else contextlib.nullcontext():
            return forward()

    def pruned(pattern):
        with dspattn.use(pattern):
            return forward()

    return {"stock": stock, **{pattern: lambda pattern=pattern: pruned(pattern) for pattern in patterns}}


def attention_alone(shape, device, dtype, patterns):
    """{name: one attention call of the model's shape}, laid out as the projections leave q, k and v."""
    tensors = [
        torch.randn(1, shape.tokens, shape.heads, shape.head_dim, device=device).to(dtype).transpose(1, 2)
        for _ in range(3)
    ]
    return contenders(lambda: torch.nn.functional.scaled_dot_product_attention(*tensors), device, patterns)


def limit(shape, whole, calls):
    """What attention is of the stock model's time by count, and how fast the model would be if it took none."""
    part = (shape.joint_blocks + shape.single_blocks) * calls["stock"]["median_us"] / whole["stock"]["median_us"]
    return {"attention_share": round(part, 4), "without_attention": round(1 / (1 - part), 4) if part < 1 else None}


def measure(shape, device, dtype, model, repeats, patterns=PATTERNS, forms=FORMS, compiler="inductor"):
    """The rows of the result, one for each form of the model."""
    torch.manual_seed(0)
    rows = []
    if device == "cuda":
        timing.warm_up()
    with torch.no_grad():
        forward, blocks, what = (plain if model == "plain" else from_diffusers)(shape, device, dtype)
        for form in sorted(forms, key=FORMS.index):
            for block in blocks if form == "compiled" else []:
                block.compile(fullgraph=True, backend=compiler)
            facts = {
                "model": what, "n": shape.tokens, "heads": shape.heads, "d": shape.head_dim, "dtype": str(dtype)[6:],
                "blocks": [shape.joint_blocks, shape.single_blocks], "compiled": form == "compiled",
            }  # fmt: skip
            rows.append(facts | row(shape, device, dtype, forward, repeats, patterns))
    return rows


def row(shape, device, dtype, forward, repeats, patterns):
    """Times of a forward pass and of attention alone, their ratios, and how far the outputs are apart."""
    functions, alone = contenders(forward, device, patterns), attention_alone(shape, device, dtype, patterns)
    outs = {name: function().float() for name, function in functions.items()}
    if device == "cuda":
        times = timing.in_turn(functions, repeats)
        calls = timing.in_turn(alone, 5 * repeats)
    else:
        times = timing.in_turn_on_cpu(functions, 0.0, "wall")
        calls = timing.in_turn_on_cpu(alone, 0.0, "wall")
    reference = outs["stock"].norm()
    return {
        "times": times, "attention_times": calls, **limit(shape, times, calls),
        "attention_ratios": {p: round(calls["stock"]["median_us"] / calls[p]["median_us"], 4) for p in patterns},
        "ratios": {p: round(times["stock"]["median_us"] / times[p]["median_us"], 4) for p in patterns},
        "relative_difference": {p: round(float((outs[p] - outs["stock"]).norm() / reference), 4) for p in patterns},
    }  # fmt: skip


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
    parser.add_argument("--model", choices=["diffusers", "plain"], help="default: diffusers where it can be imported")
    parser.add_argument("--path", help="a folder with the diffusers package")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of toy size, for trying the program")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--image-tokens", type=int, help="default: 4096, an image of 1024 x 1024 pixels")
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=PATTERNS, help="default: both")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS, help="default: both")
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
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    # A compiler of toys would take longer than all the rest: they are traced alone.
    compiler = "eager" if given.tiny else "inductor"
    rows = measure(shape, given.device, dtype, model, given.repeats, given.patterns, given.forms, compiler)
    facts = results.gpu() if given.device == "cuda" else results.cpu()
    if given.out:
        results.write(given.out, facts, rows)
    else:
        print(json.dumps({**facts, "rows": rows}, indent=1))
    best = {pattern: max(row["ratios"][pattern] for row in rows) for pattern in BAR if pattern in given.patterns}
    missed = [pattern for pattern in best if best[pattern] < BAR[pattern] and shape.tokens == BAR_TOKENS]
    for pattern in missed:
        print(f"{pattern}: {best[pattern]} times stock, bar {BAR[pattern]}", file=sys.stderr)
    return 1 if given.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
