"""A page about one model and one text: what pruning did in every layer and head. One file, no network.

The page holds the dense weights (as bytes, of their square roots), which of them were kept (as bits) and how much
weight each query kept, packed with zlib; a script inside it draws them.
"""

from __future__ import annotations

import base64
import errno
import inspect
import json
import os
import tempfile
import zlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._flags import as_flag
from .errors import DspattnError
from .patterns import Grouping, parse_grouping, parse_pattern

PLACE = "__REPORT_DATA__"
OPENING = 90  # letters of the text that the page's head quotes


def _pack(values: Tensor) -> str:
    return base64.b64encode(zlib.compress(values.contiguous().numpy().tobytes(), 9)).decode("ascii")


def _bits(flags: Tensor) -> Tensor:
    """Flags as bits, eight a byte, the first in the highest bit."""
    flat = torch.nn.functional.pad(flags.flatten().to(torch.uint8), (0, -flags.numel() % 8)).view(-1, 8)
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8)
    return (flat << shifts).sum(-1).to(torch.uint8)


def _figures(values: Tensor) -> list[float]:
    return [round(float(value), 5) for value in values]


def _tokens(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token, a space before those that start a word."""
    pieces = tokenizer.convert_ids_to_tokens(list(ids))
    if any("Ġ" in piece or "▁" in piece for piece in pieces):  # byte pairs or SentencePiece: spaces are in the tokens
        return [tokenizer.decode([token]) for token in ids]
    return [piece[2:] if piece.startswith("##") else f" {piece}" for piece in pieces]


def _opening(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= OPENING else words[:OPENING] + "…"


def collect(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    patterns: Sequence[str],
    groupings: Sequence[Grouping],
    max_tokens: int,
    title: str,
    progress: bool,
) -> dict[str, Any]:
    """What the page shows, ready for JSON."""
    from . import inspection

    whole = len(tokenizer(text)["input_ids"])
    ids = tokenizer(text, truncation=True, max_length=max_tokens)["input_ids"]
    if len(ids) < 2:
        raise DspattnError([f"text: expected at least 2 tokens, got {len(ids)}"])
    cut = f" Cut: the first {len(ids)} of {whole} tokens are shown (max_tokens)." if len(ids) < whole else ""
    layers = inspection.capture(model, torch.tensor(ids))
    if any(layer.query.shape[-2] != layer.key.shape[-2] for layer in layers):
        raise DspattnError(["model: expected self-attention in every layer (cross-attention is not drawn)"])
    content: dict[str, Any] = {
        "title": title,
        "made": f"Text: “{_opening(text)}”.{cut}",
        "small": "",
        "tokens": _tokens(tokenizer, ids),
        "layers": len(layers),
        "heads": layers[0].heads,
        "patterns": list(patterns),
        "groupings": list(groupings),
        "dense": [],
        "results": {
            f"{pattern} {grouping}": {"kept": [], "error": [], "pruned": [], "bits": [], "rows": []}
            for pattern in patterns
            for grouping in groupings
        },
    }
    if len(ids) <= 64 and "interleaved" in groupings:
        content["small"] = (
            "With up to 64 tokens no interleaved group of 1:2 or 2:4 has more keys than it keeps, and none is pruned; "
            "a longer text shows a difference."
        )
    steps: Any = layers
    if progress:
        from tqdm import tqdm

        steps = tqdm(layers, desc="report", unit=" layers")
    for layer in steps:
        with torch.inference_mode():
            dense = layer.weights("dense", "interleaved")[0]
        content["dense"].append(_pack((dense.sqrt() * 255).round().clamp(0, 255).to(torch.uint8)))
        visible = (dense > 0).flatten(1).sum(1)
        for pattern in patterns:
            for grouping in groupings:
                found = inspection.compare(layer, pattern, grouping)
                entry = content["results"][f"{pattern} {grouping}"]
                entry["kept"].append(_figures(found.kept_weight.mean(-1)))
                entry["error"].append(_figures(found.output_error))
                entry["pruned"].append(_figures(1.0 - found.kept.flatten(1).sum(1) / visible.clamp_min(1)))
                entry["bits"].append(_pack(_bits(found.kept)))
                entry["rows"].append(_pack((found.kept_weight * 65535).round().to(torch.int32).to(torch.uint16)))
    return content


def _why_not(model: Any) -> list[str]:
    """Reasons a model cannot be shown with one text."""
    kind, config = type(model).__name__, getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        return [f"model: expected a transformers model, got {kind}"]
    reads = getattr(model, "main_input_name", "input_ids")
    if reads != "input_ids":
        return [f"model: expected one that reads a text (input_ids), got {kind}, which reads {reads}"]
    if (
        getattr(config, "is_encoder_decoder", False)
        and "decoder_input_ids" in inspect.signature(model.forward).parameters
    ):
        return [
            f"model: expected one that reads a single text, got {kind}, an encoder-decoder model; "
            "model.get_encoder() can be shown"
        ]
    return []


def report(
    model: Any,
    tokenizer: Any,
    text: str,
    path: str | Path = "report.html",
    *,
    patterns: Sequence[str] = ("2:4", "1:2"),
    groupings: Sequence[Grouping] = ("interleaved", "consecutive"),
    max_tokens: int = 128,
    title: str | None = None,
    progress: bool = True,
) -> Path:
    """Writes a self-contained HTML page about what pruning does to a model's attention on one text.

    For every layer and head it shows the map, which weights were pruned, the weight each query kept and the error of
    the head's output; pattern and grouping can be switched. The page opens without a network.

    Args:
        model: a transformers model that reads one text and whose attention can be set by name, on the CPU: an encoder
            (of an encoder-decoder model, ``model.get_encoder()``) or a decoder.
        tokenizer: its tokenizer.
        text: at least two tokens of text; beyond ``max_tokens`` it is cut, which the page then says.
        path: the file to write; its folder is made.
        patterns: ``"N:M"`` patterns to show beside dense.
        groupings: ``"interleaved"``, ``"consecutive"`` or both.
        max_tokens: the page grows with its square (at 128 tokens 1.6 MB for MiniLM and 3.4 MB for SmolLM2-135M).
        title: heading of the page; default: the model's class.
        progress: draw a progress bar on standard error.

    Returns:
        The path of the file.

    Example:
        >>> from dspattn.pretrained import load_minilm
        >>> model, tokenizer = load_minilm()  # doctest: +SKIP
        >>> report(model, tokenizer, "Some text", "report.html")  # doctest: +SKIP
        PosixPath('report.html')
        >>> report(torch.nn.Linear(2, 2), str.split, "Some text", max_tokens=1)
        Traceback (most recent call last):
        dspattn.errors.DspattnError: max_tokens: expected at least 2, got 1
        model: expected a transformers model, got Linear
    """
    reasons = []
    for name, values in (("patterns", patterns), ("groupings", groupings)):
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            reasons.append(f"{name}: expected at least one in a list, got {values!r}")
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
        reasons.append(f"path: expected the name of a file, got {path!r}")
    if not isinstance(max_tokens, int) or max_tokens < 2:
        reasons.append(f"max_tokens: expected at least 2, got {max_tokens!r}")
    if not isinstance(text, str):
        reasons.append(f"text: expected a string, got {type(text).__name__}")
    if not callable(tokenizer):
        reasons.append(f"tokenizer: expected the model's tokenizer, got {type(tokenizer).__name__}")
    reasons += _why_not(model)
    if reasons:
        raise DspattnError(reasons)
    progress = as_flag("progress", progress)
    for pattern in patterns:
        parse_pattern(pattern)
    for grouping in groupings:
        parse_grouping(grouping)
    patterns, groupings = list(dict.fromkeys(patterns)), list(dict.fromkeys(groupings))
    target = Path(path)
    _check_place(target)
    content = collect(
        model,
        tokenizer,
        text,
        patterns=patterns,
        groupings=groupings,
        max_tokens=max_tokens,
        title=title or f"Attention of {type(model).__name__}, dense and pruned",
        progress=progress,
    )
    page = (files("dspattn") / "data" / "report.html").read_text(encoding="utf-8")
    # "<" cannot occur inside a script element's JSON, or a token such as "</script>" would end it.
    packed = json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    _write(target, page.replace(PLACE, packed))
    return target


def _check_place(target: Path) -> None:
    """Before the work: whether a file can be written there."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.is_file() or not target.exists():  # nothing stands beside a device
            with tempfile.TemporaryFile(dir=target.resolve().parent):
                pass
    except OSError as error:
        reason = f"path: expected a file that can be written, got {str(target)!r}: {error.strerror}"
        raise DspattnError([reason]) from None


def _write(target: Path, page: str) -> None:
    """In full, or not at all: an interruption or a full disk leaves what was there. Its permissions stay."""
    place = target.resolve()  # behind links
    if place.exists() and not place.is_file():  # a device takes its bytes as they come
        place.write_text(page, encoding="utf-8")
        return
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name[:40]}.") as beside:
        written = Path(beside) / "page"
        written.write_text(page, encoding="utf-8")
        if place.exists():
            written.chmod(place.stat().st_mode)
        written.replace(place)
