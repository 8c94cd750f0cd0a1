"""What pruning costs a language model as its context grows, and what it gains: on a GPU, in bf16, nothing fine-tuned.

    python experiments/quality/gpu_perplexity.py tokens --data FOLDER --out out/quality/tokens.npz
    python experiments/quality/gpu_perplexity.py measure --tokens out/quality/tokens.npz --cache FOLDER

`tokens` turns the texts into a file of a megabyte, so that the machine with the GPU needs neither texts nor tokenizer.
`measure` runs SmolLM2-135M-Instruct over the whole WikiText-2 test and 262,144 tokens of IMDB reviews in windows that
do not see each other, with dense attention and with each mode, and times attention alone at the same lengths. What has
not begun after --budget-seconds, loading included, is left out and named.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT)]

from quality_tasks import DataError, read_text  # noqa: E402

import dspattn  # noqa: E402
from bench.common import results, timing  # noqa: E402
from dspattn.pretrained import PretrainedError, load_smollm2  # noqa: E402

LENGTHS = (512, 1024, 2048, 4096, 8192)  # 8192: as far as the model was trained
PATTERNS, GROUPINGS, RESTS = ("2:4", "1:2"), ("interleaved", "consecutive"), ("drop", "mean")
IMDB_TOKENS = 2**18
IMDB_STEP = 20  # of the 25,000 reviews every twentieth: 1,250, of more tokens than are asked for
BATCH_TOKENS = 2**16  # of one pass through the model: enough that launches do not count
HEAD_TOKENS = 2**13  # of one piece of logits: 1.6 GB in fp32


@dataclass(frozen=True)
class Mode:
    pattern: str = "dense"
    grouping: str = "none"
    rest: str = "none"

    @property
    def dense(self) -> bool:
        return self.pattern == "dense"

    @property
    def label(self) -> str:
        return " ".join([self.pattern] + ([] if self.dense else [self.grouping, self.rest]))

    @property
    def name(self) -> str:
        """What transformers knows it by. Dense is PyTorch's own attention: the stock model."""
        if self.dense:
            return "sdpa"
        parts = ["dspattn", self.pattern.replace(":", "_")]
        return "_".join(parts + ["consecutive"] * (self.grouping == "consecutive") + ["mean"] * (self.rest == "mean"))


DENSE = Mode()
MODES = (DENSE, *(Mode(p, g, r) for p in PATTERNS for g in GROUPINGS for r in RESTS))


# ---- the texts


def texts(data: Path) -> dict[str, str]:
    reviews = read_text(data, "imdb/test.tsv.xz").rstrip("\n").split("\n")[::IMDB_STEP]
    return {
        "wikitext2": read_text(data, "wikitext2/wiki.test.raw.xz"),
        # A review's line breaks are HTML tags. Left in, they are easy to predict and flatter every perplexity.
        "imdb": "\n\n".join(line.split("\t")[4].replace("<br />", "\n") for line in reviews),
    }


def write_tokens(data: Path, out: Path, cache: str | None) -> dict[str, int]:
    """The token ids of both texts, 16 bits each; how many of each."""
    _, tokenizer = load_smollm2(folder=cache)
    ids = {name: np.array(tokenizer(text)["input_ids"]) for name, text in texts(data).items()}
    if len(ids["imdb"]) < IMDB_TOKENS:
        raise DataError(f"imdb: expected at least {IMDB_TOKENS} tokens, got {len(ids['imdb'])}")
    ids["imdb"] = ids["imdb"][:IMDB_TOKENS]
    largest = max(int(found.max()) for found in ids.values())
    if largest >= 2**16:
        raise DataError(f"tokens: expected ids below 65536, got {largest}")
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, allow_pickle=False, **{name: found.astype(np.uint16) for name, found in ids.items()})
    return {name: len(found) for name, found in ids.items()}


def read_tokens(path: Path, limit: int | None) -> dict[str, Tensor]:
    if not path.is_file():
        raise DataError(f"--tokens: expected the file that `gpu_perplexity.py tokens` writes, {path} does not exist")
    with np.load(path) as stored:
        return {name: torch.from_numpy(stored[name].astype(np.int64))[:limit] for name in stored.files}


def batches(ids: Tensor, length: int, batch_tokens: int) -> Iterator[Tensor]:
    """[windows, length] pieces of the text in order; the last window, shorter, comes alone."""
    whole = len(ids) // length * length
    if whole:
        yield from ids[:whole].view(-1, length).split(max(1, batch_tokens // length))
    if len(ids) - whole > 1:
        yield ids[whole:].view(1, -1)


# ---- losses


def attention_context(device: str) -> AbstractContextManager[Any]:
    """Dense attention on a GPU is cuDNN's; what cuDNN does not take, FlashAttention's."""
    if device == "cpu":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)


def window_losses(model: Any, windows: Tensor) -> Tensor:
    """Sum of the next-token losses of each window, in nats, fp64."""
    hidden = model.model(windows, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    targets = windows[:, 1:].flatten()
    pieces = [
        torch.nn.functional.cross_entropy(model.lm_head(part).float(), target, reduction="none")
        for part, target in zip(hidden.split(HEAD_TOKENS), targets.split(HEAD_TOKENS), strict=True)
    ]
    return torch.cat(pieces).double().view(len(windows), -1).sum(1)


def losses_of(model: Any, ids: Tensor, length: int, device: str, batch_tokens: int) -> tuple[Any, Any]:
    """Sums of losses, and how many tokens were predicted, window by window."""
    sums, counts = [], []
    with torch.inference_mode(), attention_context(device):
        for windows in batches(ids, length, batch_tokens):
            sums.append(window_losses(model, windows.to(device)))
            counts += [windows.shape[1] - 1] * len(windows)
    return torch.cat(sums).cpu().numpy(), np.array(counts)


@dataclass(frozen=True)
class Change:
    """Of the perplexity against dense, in per cent, with twice its standard error."""

    perplexity: float
    change_percent: float
    two_se_percent: float


def paired_change(own: NDArray[Any], dense: NDArray[Any], counts: NDArray[Any]) -> Change:
    """From the losses of the same windows under both. The standard error is that of the mean difference of a token, a
    ratio of two sums over windows, which are taken as independent; of one window alone it is not known."""
    tokens, windows = counts.sum(), len(counts)
    mean = (own - dense).sum() / tokens
    residuals = (own - dense) - mean * counts
    error = math.sqrt(windows / (windows - 1) * (residuals**2).sum()) / tokens if windows > 1 else math.nan
    ratio = math.exp(mean)
    return Change(math.exp(own.sum() / tokens), 100 * (ratio - 1), 100 * ratio * 2 * error)


# ---- speed


def attention_call(mode: Mode, q: Tensor, k: Tensor, v: Tensor) -> Any:
    if mode.dense:
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    options: dict[str, Any] = {"pattern": mode.pattern, "grouping": mode.grouping}
    if mode.rest != "drop":
        options["rest"] = mode.rest
    return lambda: dspattn.attention(q, k, v, is_causal=True, enable_gqa=True, **options)


def attention_times(
    mode: Mode, length: int, shape: tuple[int, int, int], device: str, batch_tokens: int
) -> dict[str, float]:
    """Of causal attention alone over a batch of ``batch_tokens`` tokens, as the project's other benchmarks time."""
    heads, kv_heads, d = shape
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    batch = max(1, batch_tokens // length)

    def drawn(count: int) -> Tensor:
        return torch.randn(batch, length, count, d, device=device, generator=generator).to(dtype).transpose(1, 2)

    call = attention_call(mode, drawn(heads), drawn(kv_heads), drawn(kv_heads))
    with torch.inference_mode(), attention_context(device):
        if device == "cpu":
            found = timing.in_turn_on_cpu({"call": call}, 0.0, "wall")["call"]
        else:
            found = timing.burst(timing.Graphed([call]), 0.05)
    return {**found, "tokens_per_s": round(1e6 * batch * length / found["median_us"])}


# ---- the run


class Budget:
    def __init__(self, seconds: float) -> None:
        self.ends = time.monotonic() + seconds

    def spent(self) -> bool:
        return time.monotonic() > self.ends


def attempt(what: str, work: Any) -> dict[str, Any]:
    """What was measured, or why nothing was: a mode that no kernel serves is a result."""
    try:
        return work()
    except (dspattn.DspattnError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        print(f"  {what}: skipped ({reason})", file=sys.stderr, flush=True)
        return {"skipped": reason}


def measure(
    model: Any, tokens: dict[str, Tensor], lengths: Sequence[int], modes: Sequence[Mode], device: str,
    batch_tokens: int, budget: Budget, keep: Any = lambda rows, left_out: None,
) -> tuple[list[dict[str, Any]], list[str]]:  # fmt: skip
    """Rows of both parts, and what was left out for want of time. ``keep(rows, left_out)`` is called after each."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (config.num_attention_heads, config.num_key_value_heads, head_dim)
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    dense: dict[tuple[str, int], NDArray[Any]] = {}
    for length in lengths:
        for mode in (DENSE, *(mode for mode in modes if not mode.dense)):
            if budget.spent():
                left_out.append(f"n = {length}, {mode.label}")
                continue
            began = time.perf_counter()

            about = {**asdict(mode), "n": length}
            sizes = dict(zip(("heads", "kv_heads", "d"), shape, strict=True))
            work = partial(attention_times, mode, length, shape, device, batch_tokens)
            speed = attempt(f"attention, n = {length}, {mode.label}", work)
            rows.append({"part": "speed", **about, "batch": max(1, batch_tokens // length), **sizes, **speed})
            for text, ids in tokens.items():

                def lost(mode: Mode = mode, length: int = length, text: str = text, ids: Tensor = ids) -> Any:
                    model.set_attn_implementation(mode.name)
                    sums, counts = losses_of(model, ids, length, device, batch_tokens)
                    if mode.dense:
                        dense[text, length] = sums
                    if (text, length) not in dense:
                        raise RuntimeError("dense attention was not measured")
                    found = asdict(paired_change(sums, dense[text, length], counts))
                    rounded = {key: round(value, 5) if math.isfinite(value) else None for key, value in found.items()}
                    return {"windows": len(counts), "tokens": int(counts.sum()), **rounded}

                what = f"{text}, n = {length}, {mode.label}"
                found = attempt(what, lost)
                rows.append({"part": "perplexity", "text": text, **about, **found})
                if "skipped" not in found:
                    print(
                        f"  {what}: {found['perplexity']:.3f} ({found['change_percent']:+.2f} %)",
                        file=sys.stderr, flush=True,
                    )  # fmt: skip
            print(f"n = {length}, {mode.label}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
            keep(rows, left_out)
    keep(rows, left_out)
    return rows, left_out


def facts(device: str) -> dict[str, Any]:
    import transformers

    found = results.gpu() if device == "cuda" else results.cpu()
    versions = {**found["versions"], "transformers": transformers.__version__, "numpy": np.__version__}
    return {**found, "versions": versions, "model": "SmolLM2-135M-Instruct (Q4_1 weights, expanded)"}


def commands(
    description: str | None, measure: str, texts: str, tokens_file: Path
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """A program that writes a token file and measures on it, with what every such program is told; and the parser of
    `measure`, for what is its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    both = parser.add_subparsers(dest="command", required=True)
    tokens = both.add_parser("tokens", help="write the token file")
    tokens.add_argument("--data", type=Path, required=True, help=f"folder with {texts}")
    tokens.add_argument("--out", type=Path, default=tokens_file)
    run = both.add_parser("measure", help=measure)
    run.add_argument("--tokens", type=Path, default=tokens_file)
    run.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    for command in (tokens, run):
        command.add_argument("--cache", help="folder of the model (default: $DSPATTN_CACHE or ~/.cache/dspattn)")
    return parser, run


def has_written_tokens(options: argparse.Namespace, write: Callable[[Path, Path, str | None], dict[str, int]]) -> bool:
    """Whether the command was to write the token file; it then stands there."""
    if options.command != "tokens":
        return False
    counts = write(options.data, options.out, options.cache)
    print(f"{options.out}: " + ", ".join(f"{count} tokens of {name}" for name, count in counts.items()))
    return True


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser, run = commands(
        __doc__, "run the model and time attention", "wikitext2 and imdb (see README.md)",
        ROOT / "out" / "quality" / "tokens.npz",
    )  # fmt: skip
    run.add_argument("--lengths", type=numbers, default=list(LENGTHS), help="windows, e.g. 512,1024")
    run.add_argument("--modes", type=lambda text: text.split(","), help="labels, e.g. '2:4 interleaved mean'")
    run.add_argument("--limit", type=int, help="tokens of each text (default: all)")
    run.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS)
    run.add_argument("--budget-seconds", type=float, default=150.0, help="of the whole run; the rest is left out")
    run.add_argument("--out", type=Path, default=HERE / "results" / "gpu" / "perplexity.json")
    options = parser.parse_args(arguments)
    if options.command == "measure" and options.modes:
        unknown = [label for label in options.modes if label not in {mode.label for mode in MODES}]
        if unknown:
            run.error(f"--modes: expected some of {', '.join(mode.label for mode in MODES)}, got {', '.join(unknown)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        if has_written_tokens(options, write_tokens):
            return 0
        budget = Budget(options.budget_seconds)
        tokens = read_tokens(options.tokens, options.limit)
        model, _ = load_smollm2(folder=options.cache)
    except (DataError, PretrainedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    model = model.to(options.device, torch.float32 if options.device == "cpu" else torch.bfloat16)
    if options.device == "cuda":
        timing.warm_up(2.0)
    head = facts(options.device)
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def keep(rows: list[dict[str, Any]], left_out: list[str]) -> None:
        results.write(options.out, {**head, "left_out": left_out}, rows)

    modes = [mode for mode in MODES if not options.modes or mode.label in options.modes]
    _, left_out = measure(
        model, tokens, options.lengths, modes, options.device, options.batch_tokens, budget, keep
    )  # fmt: skip
    if left_out:
        print(f"left out after {options.budget_seconds:g} s: {'; '.join(left_out)}", file=sys.stderr)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
