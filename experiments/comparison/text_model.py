"""Figure 4: Long Range Arena's text classifier of four layers, its attention exchanged."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import contenders
import torch
from contenders import DTYPES, Attend, Contender
from figures import HEAD_DIM, Row, say
from measuring import Clock, attempt, observed
from torch import Tensor

LAYERS, VOCABULARY, CLASSES = 4, 256, 2  # bytes in, two classes out: text_classification/base_tc_config


class Layer(torch.nn.Module):
    """Attention and feed-forward, each behind a layer norm and added to its input."""

    def __init__(self, heads: int, hidden: int, attend: Attend) -> None:
        super().__init__()
        width = heads * HEAD_DIM
        self.heads = heads
        self.attend = attend
        self.before_attention, self.before_feed_forward = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.projections = torch.nn.Linear(width, 3 * width)
        self.joined = torch.nn.Linear(width, width)
        self.feed_forward = torch.nn.Sequential(
            torch.nn.Linear(width, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, width)
        )
        self.around: Any = nullcontext  # what a measurement puts around attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, HEAD_DIM)).transpose(1, 2)
            for part in self.projections(self.before_attention(x)).chunk(3, -1)
        )
        with self.around():
            out = self.attend(q, k, v)
        x = x + self.joined(out.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.before_feed_forward(x))


class TextModel(torch.nn.Module):
    def __init__(self, heads: int, hidden: int, n: int, attends: Sequence[Attend]) -> None:
        super().__init__()
        width = heads * HEAD_DIM
        self.tokens = torch.nn.Embedding(VOCABULARY, width)
        self.places = torch.nn.Parameter(torch.zeros(n, width))
        self.layers = torch.nn.ModuleList(Layer(heads, hidden, attend) for attend in attends)
        self.norm = torch.nn.LayerNorm(width)
        self.classes = torch.nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.classes(self.norm(x[:, 0]))


def _measured(model: TextModel, ids: Tensor, clock: Clock, times: Row | None = None) -> Row:
    with torch.inference_mode():
        found: Row = dict(times) if times is not None else clock.times(lambda: model(ids))
        shares = []
        for _ in range(5 if clock.case_seconds == float("inf") else 1):
            marks: list[tuple[str, Any, Any]] = []
            with observed(clock, []):
                begin = clock._mark()
                for layer in model.layers:
                    layer.around = partial(_Noted, clock, marks)
                model(ids)
                end = clock._mark()
            if clock.cuda:
                torch.cuda.synchronize()
            shares.append(sum(clock._between(a, b) for _, a, b in marks) / clock._between(begin, end))
        for layer in model.layers:
            layer.around = nullcontext
        found["attention_us"] = round(sorted(shares)[len(shares) // 2] * found["median_us"], 2)
        found["peak_bytes"] = clock.peak_bytes(lambda: model(ids))
    return found


class _Noted:
    """A context that notes when attention began and ended."""

    def __init__(self, clock: Clock, marks: list[tuple[str, Any, Any]]) -> None:
        self.clock, self.marks = clock, marks

    def __enter__(self) -> None:
        self.begin = self.clock._mark()

    def __exit__(self, *_: Any) -> None:
        self.marks.append(("attention", self.begin, self.clock._mark()))


def _made(one: Contender, heads: int, hidden: int, ids: Tensor, device: str, dtype: torch.dtype) -> TextModel:
    n = ids.shape[1]
    attends = [one.make(heads, HEAD_DIM, n, device, dtype) for _ in range(LAYERS)]
    torch.manual_seed(0)
    return TextModel(heads, hidden, n, attends).to(device=device, dtype=dtype).eval()


def _together(chosen: Sequence[Contender], make: Any, ids: Tensor, clock: Clock) -> dict[str, Row]:
    """Of models that are compared with each other: timed in turn. What cannot run is a row with its reason."""
    models: dict[str, TextModel] = {}
    found: dict[str, Row] = {}

    def tried(one: Contender) -> Row:
        model = make(one)
        with torch.inference_mode():
            model(ids)
        models[one.name] = model
        return {}

    for one in chosen:
        found[one.name] = attempt(one.name, partial(tried, one), clock)
    with torch.inference_mode():
        times = clock.in_turn({name: partial(model, ids) for name, model in models.items()})
    for name, model in models.items():
        found[name] = attempt(name, partial(_measured, model, ids, clock, times[name]), clock)
    return found


def end_to_end(
    device: str, lengths: Sequence[int], heads: Sequence[int], hidden: Sequence[int], dtypes: Sequence[str],
    tokens: int, clock: Clock, names: Sequence[str] | None,
) -> list[Row]:  # fmt: skip
    """Time of a forward pass, attention's part of it, and peak memory, for every combination.

    Dense attention and this package's come first, at every size; where time runs out, what is missing are the other
    mechanisms at the last sizes.
    """
    rows: list[Row] = []
    cases = itertools.product((True, False), dtypes, hidden, heads, lengths)
    for first, dtype, width, count, n in cases:
        batch = max(1, tokens // n)
        ids = torch.randint(0, VOCABULARY, (batch, n), generator=torch.Generator().manual_seed(0)).to(device)
        say(f"model: {dtype}, n = {n}, {count} heads, feed-forward {width}, batch {batch}")
        chosen = [
            one
            for one in contenders.contenders(device, dtype)
            if (one.kind in ("dense", "ours")) == first and (not names or one.name in names)
        ]

        def make(one: Contender, count: int = count, width: int = width, ids: Tensor = ids, dtype: str = dtype) -> Any:
            return _made(one, count, width, ids, device, DTYPES[dtype])

        # Dense attention and this package's are compared with each other; the others are many, and come one by one.
        found: dict[str, Row] = {}
        for group in [chosen] if first else [[one] for one in chosen]:
            found |= _together(group, make, ids, clock)
        for one in chosen:
            rows.append(
                {"part": "model", "kernel": one.name, "kind": one.kind, "pattern": one.pattern,
                 "grouping": one.grouping, "dtype": dtype, "batch": batch, "heads": count,
                 "kv_heads": count, "n_q": n, "n_k": n, "d": HEAD_DIM, "feed_forward": width,
                 "layers": LAYERS, "mask": "full", "pass": "forward", **found[one.name]}
            )  # fmt: skip
    return rows
