"""Fine-tunes SmolLM2-135M on WikiText-2 with dense, 2:4 and 1:2 attention, several seeds, and times the steps.

    python experiments/finetune/run.py tokens --data FOLDER
    python experiments/finetune/run.py measure --cache FOLDER      # on a GPU; 150 s at most
    python experiments/finetune/run.py measure --random --batch 8  # speed alone: needs neither weights nor texts
    python experiments/finetune/run.py measure --tiny --device cpu --steps 6 --length 160 --batch 2

`tokens` turns the texts into one file, so that the machine with the GPU needs neither texts nor tokenizer. `measure`
trains the models of one seed side by side: each takes a step in turn, on the same windows of text, so that they share
the state of the machine, and which one begins changes from step to step. A step is forward, backward, clipping and
AdamW; weights are fp32, on a GPU forward and backward run in bf16 (autocast). Dense attention is PyTorch's
scaled_dot_product_attention, by the kernel that it chooses. At the end each model reads the whole
test text. If the asked steps would not fit into --budget-seconds, all runs take fewer; the file says how many.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "experiments" / "quality")]

import finetune as example  # noqa: E402
from gpu_perplexity import (  # noqa: E402
    Budget,
    commands,
    has_written_tokens,
    losses_of,
    paired_change,
    read_tokens,
)
from quality_tasks import DataError, read_text  # noqa: E402

from bench.common import results, timing  # noqa: E402
from dspattn.pretrained import PretrainedError, load_smollm2  # noqa: E402

ATTENTIONS = ("sdpa", "dspattn_2_4", "dspattn_1_2")  # the first is what the others are compared with
TEXTS = {"train": "wikitext2/wiki.train.tokens.xz", "test": "wikitext2/wiki.test.tokens.xz"}
TRAIN_TOKENS = 2**21
JUDGED_AT_ONCE = 2**15  # tokens of one pass over the test text
WARM_UPS = 3  # steps before the runs, of which the last says how long one takes


def write_tokens(data: Path, out: Path, cache: str | None) -> dict[str, int]:
    """The token ids of both texts, 16 bits each; how many of each."""
    _, tokenizer = load_smollm2(folder=cache)
    ids = {}
    for name, file in TEXTS.items():
        found = np.array(tokenizer(read_text(data, file))["input_ids"])[:TRAIN_TOKENS]
        if found.max() >= 2**16:
            raise DataError(f"tokens: expected ids below 65536, got {found.max()}")
        ids[name] = found.astype(np.uint16)
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, allow_pickle=False, **ids)
    return {name: len(found) for name, found in ids.items()}


@dataclass
class Run:
    """One model in training."""

    attention: str
    seed: int
    model: Any
    optimizer: Any
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def start(base: Any, attention: str, seed: int, options: argparse.Namespace) -> Run:
    model = copy.deepcopy(base).to(options.device)
    model.set_attn_implementation(attention)
    fused = {"fused": True} if options.device == "cuda" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.1, **fused)
    return Run(attention, seed, model.train(), optimizer)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed_step(run: Run, batch: Tensor, rate: float, device: str) -> tuple[float, float]:
    """(loss, seconds) of one step of training."""
    wait(device)
    begin = time.perf_counter()
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    loss = example.forward(run.model, batch, device)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.optimizer.zero_grad()
    wait(device)
    return float(loss.detach()), time.perf_counter() - begin


def judge(run: Run, text: Tensor, options: argparse.Namespace) -> tuple[Any, Any]:
    """Sums of losses, and how many tokens were predicted, of every window of the test text."""
    run.model.eval()
    with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
        found = losses_of(run.model, text, options.length, options.device, JUDGED_AT_ONCE)
    run.model.train()
    return found


@dataclass(frozen=True)
class Calibration:
    """What was found before the runs: perplexities of the model as it is, and how many steps there is time for."""

    before: dict[str, float]
    steps: int


def calibrate(base: Any, windows: Tensor, text: Tensor, options: argparse.Namespace, budget: Budget) -> Calibration:
    """Times steps at rate 0, which change nothing and warm up, and the reading of the test text."""
    before = {}
    step_seconds = judge_seconds = 0.0
    for attention in ATTENTIONS:
        run = start(base, attention, 0, options)
        batch = windows[: options.batch]
        step_seconds += [timed_step(run, batch, 0.0, options.device)[1] for _ in range(WARM_UPS)][-1]
        begin = time.perf_counter()
        sums, counts = judge(run, text, options)
        judge_seconds += time.perf_counter() - begin
        before[attention] = math.exp(sums.sum() / counts.sum())
    left = (budget.ends - time.monotonic()) / len(options.seeds)
    room = int(0.9 * (left - judge_seconds) / step_seconds)
    print(f"{step_seconds:.3f} s for a step of each, {judge_seconds:.1f} s for judging, {room} steps fit", flush=True)
    return Calibration(before, max(1, min(options.steps, room)))


def train(
    base: Any, seed: int, windows: Tensor, text: Tensor, before: dict[str, float], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """All runs of a seed, step by step in turn; a row each."""
    runs = [start(base, attention, seed, options) for attention in ATTENTIONS]
    for step in tqdm(range(options.steps), desc=f"seed {seed}", unit=" steps", disable=None):
        batch = example.batch_of(step, seed, windows, options.batch)
        first = step % len(runs)
        for run in runs[first:] + runs[:first]:
            loss, seconds = timed_step(run, batch, example.rate_at(step, options), options.device)
            run.losses.append(loss)
            run.seconds.append(seconds)
    judged = [judge(run, text, options) for run in runs]
    dense_sums, counts = judged[0]
    rows = []
    for run, (sums, _) in zip(runs, judged, strict=True):
        change = asdict(paired_change(sums, dense_sums, counts))
        # Of the same step, so that what slows the machine down slows both.
        ratios = [dense / own for dense, own in zip(runs[0].seconds, run.seconds, strict=True)]
        rows.append(
            {"attention": run.attention, "seed": seed, "perplexity_before": round(before[run.attention], 4),
             **{key: round(value, 5) if math.isfinite(value) else None for key, value in change.items()},
             "seconds_per_step": round(statistics.median(run.seconds), 5),
             "speed_over_sdpa": round(statistics.median(ratios), 4),
             "losses": [round(loss, 5) for loss in run.losses]}
        )  # fmt: skip
        print(
            f"seed {seed}, {run.attention}: perplexity {before[run.attention]:.3f} -> {change['perplexity']:.3f} "
            f"({change['change_percent']:+.2f} % of sdpa's), {rows[-1]['seconds_per_step']:.4f} s a step, "
            f"{rows[-1]['speed_over_sdpa']:.3f} of sdpa's speed",
            flush=True,
        )
    return rows


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser, run = commands(__doc__, "train and time", "wikitext2", ROOT / "out" / "finetune" / "tokens.npz")
    run.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    run.add_argument("--steps", type=int, default=120, help="at most")
    run.add_argument("--length", type=int, default=1024, help="tokens of a window")
    run.add_argument("--batch", type=int, default=8, help="windows of a step")
    run.add_argument("--rate", type=float, default=2e-4, help="highest learning rate")
    run.add_argument("--warm-up", type=int, default=10, help="steps until it is reached; then it falls as a cosine")
    run.add_argument("--limit", type=int, help="tokens of the test text (default: all)")
    run.add_argument("--budget-seconds", type=float, default=150.0, help="of the whole run, loading included")
    shapes = run.add_mutually_exclusive_group()
    shapes.add_argument("--tiny", action="store_true", help="a small random model on made-up tokens")
    shapes.add_argument("--random", action="store_true", help="SmolLM2-135M's shape, random, on made-up tokens")
    run.add_argument("--out", type=Path, default=HERE / "results" / "finetune.json")
    options = parser.parse_args(arguments)
    for name in ("steps", "length", "batch"):
        if options.command == "measure" and getattr(options, name) < 1:
            run.error(f"--{name}: expected at least 1, got {getattr(options, name)}")
    return options


def load(options: argparse.Namespace) -> tuple[Any, Tensor, Tensor]:
    """The model on the CPU, fp32, windows of the training text, the test text."""
    if options.tiny or options.random:
        import transformers

        torch.manual_seed(0)
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                 "intermediate_size")  # fmt: skip
        values = (64, 64, 2, 4, 2, 128) if options.tiny else (49152, 576, 30, 9, 3, 1536)
        config = transformers.LlamaConfig(**dict(zip(sizes, values, strict=True)), tie_word_embeddings=options.random)
        model = transformers.LlamaForCausalLM(config)
        tokens = {name: torch.arange(40 * options.length) ** 2 % 61 for name in TEXTS}
    else:
        tokens = read_tokens(options.tokens, None)
        model, _ = load_smollm2(folder=options.cache)
    count = (len(tokens["train"]) - 1) // options.length
    if count < options.batch:
        raise DataError(f"--batch: expected at most the {count} windows of the training text, got {options.batch}")
    # One token more than attention sees: the last one is predicted only.
    windows = tokens["train"].unfold(0, options.length + 1, options.length)
    return model, windows, tokens["test"][: options.limit]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        if has_written_tokens(options, write_tokens):
            return 0
        budget = Budget(options.budget_seconds)
        base, windows, text = load(options)
    except (DataError, PretrainedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("high")
    if options.device == "cuda":
        timing.warm_up(1.0)
    asked = options.steps
    found = calibrate(base, windows, text, options, budget)
    options.steps = found.steps
    head = results.gpu() if options.device == "cuda" else results.cpu()
    trained = "SmolLM2-135M-Instruct (Q4_1 weights, expanded)"
    head["model"] = "small, random" if options.tiny else "SmolLM2-135M's shape, random" if options.random else trained
    head["training"] = {
        "steps": options.steps, "steps_asked": asked, "length": options.length, "batch": options.batch,
        "rate": options.rate, "warm_up": options.warm_up, "test_tokens": len(text),
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        rows += train(base, seed, windows, text, found.before, options)
        results.write(options.out, head, rows)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
