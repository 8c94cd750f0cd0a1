"""The tasks of the quality experiment: the text they read, what is computed for one attention, and their figures.

A task computes `items` for one model with one attention (the slow part, kept on disk), and `figures` turns the items
of a pattern and those of dense attention into rows (quick). Both take everything from the data folder and the seed.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from dspattn import evaluate

Items = dict[str, NDArray[Any]]
Advance = Callable[[int], object]


class DataError(RuntimeError):
    """A data file is missing or not what it should be."""


def read_text(data: Path, name: str) -> str:
    path = data / name
    if not path.is_file():
        raise DataError(f"--data: expected the file {path}, which does not exist")
    with lzma.open(path, "rt", encoding="utf-8") as stream:
        return stream.read()


@dataclass(frozen=True)
class Figure:
    """One measured number with its 95 % interval, and its change against dense attention on the same items."""

    metric: str
    value: float
    low: float
    high: float
    count: int
    change: float
    change_low: float
    change_high: float
    change_unit: str


def paired(
    metric: str,
    statistic: Callable[[Items, NDArray[np.int64]], float],
    own: Items,
    dense: Items,
    count: int,
    clusters: NDArray[np.int64] | None = None,
    *,
    relative: bool = False,
) -> Figure:
    """A figure and its change against dense, from resamples that draw the same items for both."""
    everything = np.arange(count)

    def change(indices: NDArray[np.int64]) -> float:
        here, there = statistic(own, indices), statistic(dense, indices)
        return 100.0 * (here / there - 1.0) if relative else here - there

    low, high = evaluate.bootstrap(lambda indices: statistic(own, indices), count, clusters=clusters)
    change_low, change_high = evaluate.bootstrap(change, count, clusters=clusters)
    return Figure(
        metric,
        statistic(own, everything),
        low,
        high,
        count,
        change(everything),
        change_low,
        change_high,
        "percent" if relative else "absolute",
    )


class Sts:
    """STS-B test: how well the cosine of two sentence vectors ranks the pairs as people do (Spearman x 100)."""

    name = "stsb"
    model = "MiniLM"
    about: ClassVar[dict[str, Any]] = {"data": "STS-B English test", "max_tokens": 512}

    def __init__(self, data: Path) -> None:
        rows = list(csv.reader(io.StringIO(read_text(data, "stsb/stsb-en-test.csv.xz"))))
        self.left, self.right = [row[0] for row in rows], [row[1] for row in rows]
        self.gold = np.array([float(row[2]) for row in rows])

    def size(self) -> int:
        return 2 * len(self.left)

    def items(self, model: Any, tokenizer: Any, advance: Advance, keep: Path) -> Items:
        vectors = evaluate.embed(model, tokenizer, self.left + self.right, advance=advance).double()
        first, second = vectors.split(len(self.left))
        longest = max(len(ids) for ids in tokenizer(self.left + self.right)["input_ids"])
        return {"cosine": (first * second).sum(-1).numpy(), "longest": np.array([longest])}

    def figures(self, own: Items, dense: Items) -> Iterator[Figure]:
        def statistic(items: Items, indices: NDArray[np.int64]) -> float:
            return 100.0 * evaluate.spearman(items["cosine"][indices], self.gold[indices])

        yield paired("spearman_x100", statistic, own, dense, len(self.gold))


class Squad:
    """SQuAD dev: find the passage a question was asked about among 800; questions always embedded densely."""

    name = "squad_retrieval"
    model = "MiniLM"
    passages_used = 800
    about: ClassVar[dict[str, Any]] = {"data": "SQuAD v1.1 dev, first 800 passages, their questions", "max_tokens": 512}

    def __init__(self, data: Path) -> None:
        content = json.loads(read_text(data, "squad/dev-v1.1.json.xz"))
        paragraphs = [paragraph for article in content["data"] for paragraph in article["paragraphs"]]
        paragraphs = paragraphs[: self.passages_used]
        self.passages = [paragraph["context"] for paragraph in paragraphs]
        self.questions = [entry["question"] for paragraph in paragraphs for entry in paragraph["qas"]]
        self.answer = np.array([index for index, paragraph in enumerate(paragraphs) for _ in paragraph["qas"]])

    def size(self) -> int:
        return len(self.passages)

    def items(self, model: Any, tokenizer: Any, advance: Advance, keep: Path) -> Items:
        vectors = evaluate.embed(model, tokenizer, self.passages, advance=advance)
        lengths = [len(ids) for ids in tokenizer(self.passages, truncation=True, max_length=512)["input_ids"]]
        return {"passages": vectors.numpy(), "lengths": np.array(lengths)}

    def question_items(self, model: Any, tokenizer: Any, advance: Advance) -> Items:
        """The dense vectors of the questions, computed once."""
        return {"questions": evaluate.embed(model, tokenizer, self.questions, advance=advance).numpy()}

    def figures(self, own: Items, dense: Items) -> Iterator[Figure]:
        questions = dense["questions"].astype(np.float64)

        def rank(items: Items) -> Items:
            scores = questions @ items["passages"].astype(np.float64).T
            right = scores[np.arange(len(scores)), self.answer][:, None]
            return {"rank": (scores > right).sum(1) + 1}

        ranked, ranked_dense = rank(own), rank(dense)
        count = len(self.answer)
        yield paired(
            "recall_at_1",
            lambda i, n: 100.0 * float((i["rank"][n] == 1).mean()),
            ranked,
            ranked_dense,
            count,
            self.answer,
        )
        yield paired(
            "mrr_x100",
            lambda i, n: 100.0 * float((1.0 / i["rank"][n]).mean()),
            ranked,
            ranked_dense,
            count,
            self.answer,
        )
        cosine = {"cosine": (own["passages"].astype(np.float64) * dense["passages"]).sum(-1)}
        same = {"cosine": (dense["passages"].astype(np.float64) ** 2).sum(-1)}
        yield paired("cosine_to_dense", lambda i, n: float(i["cosine"][n].mean()), cosine, same, len(self.passages))


class LanguageModel:
    """Perplexity of SmolLM2-135M over the first tokens of a text, in windows that do not see each other."""

    model = "SmolLM2-135M"
    block = 128  # tokens that are resampled together: neighbouring losses are correlated

    def __init__(self, data: Path, corpus: str, context: int, tokens: int, judged: int | None = None) -> None:
        """``tokens`` are run; the figures are those of the first ``judged`` of them, default all."""
        self.name = f"{corpus}_{context}"
        self.context, self.tokens, self.judged = context, tokens, judged or tokens
        if corpus == "wikitext2":
            self.text = read_text(data, "wikitext2/wiki.test.raw.xz")
            source = "WikiText-2 test (raw)"
        else:
            lines = read_text(data, "imdb/test.tsv.xz").rstrip("\n").split("\n")
            # A review's line breaks are HTML tags. Left in, they are easy to predict and flatter every perplexity.
            self.text = "\n\n".join(line.split("\t")[4].replace("<br />", "\n") for line in lines[::500])
            source = "IMDB test, every 500th review, joined by blank lines"
        self.about: dict[str, Any] = {"data": f"{source}, first {self.judged} tokens", "context": context}

    def size(self) -> int:
        return self.tokens

    def items(self, model: Any, tokenizer: Any, advance: Advance, keep: Path) -> Items:
        ids = torch.tensor(tokenizer(self.text)["input_ids"][: self.tokens])
        if len(ids) < self.tokens:
            raise DataError(f"{self.name}: expected at least {self.tokens} tokens, got {len(ids)}")
        losses, predictions = [], []
        for index, window in enumerate(ids.split(self.context)):
            done = keep / f"{index}.npz"
            if not done.is_file():  # a stopped run goes on with the next window
                loss, prediction = evaluate.token_losses(model, window)
                keep.mkdir(parents=True, exist_ok=True)
                partial = done.with_suffix(".partial.npz")
                np.savez(partial, loss=loss.numpy(), prediction=prediction.numpy())
                partial.rename(done)
            with np.load(done) as stored:
                losses.append(stored["loss"])
                predictions.append(stored["prediction"])
            advance(len(window))
        return {"losses": np.concatenate(losses), "predictions": np.concatenate(predictions)}

    def figures(self, own: Items, dense: Items) -> Iterator[Figure]:
        yield from self.figures_of("perplexity", "same_top_token", own, dense, self.judged)
        if self.judged < self.tokens:
            yield from self.figures_of("perplexity_all", "same_top_token_all", own, dense, self.tokens)

    def figures_of(self, perplexity: str, same: str, own: Items, dense: Items, tokens: int) -> Iterator[Figure]:
        """Perplexity and agreement over the windows of the first ``tokens``, under these names."""
        count = tokens - tokens // self.context  # the first token of a window is not predicted
        blocks = np.arange(count) // self.block
        yield paired(
            perplexity, lambda i, n: evaluate.perplexity(i["losses"][n]), own, dense, count, blocks, relative=True
        )
        agree = {"same": (own["predictions"] == dense["predictions"]).astype(np.float64)}
        always = {"same": np.ones(len(dense["losses"]))}
        yield paired(same, lambda i, n: 100.0 * float(i["same"][n].mean()), agree, always, count, blocks)


Task = Sts | Squad | LanguageModel

TASKS: dict[str, Callable[[Path], Task]] = {
    "stsb": Sts,
    "squad_retrieval": Squad,
    "wikitext2_1024": lambda data: LanguageModel(data, "wikitext2", 1024, 6144),
    "imdb_2048": lambda data: LanguageModel(data, "imdb", 2048, 6144),
    # The expectation was stated for 12,800 tokens; its five values are those of the first 24 windows, 12,288 tokens.
    "wikitext2_512": lambda data: LanguageModel(data, "wikitext2", 512, 12800, judged=12288),
    "wikitext2_2048": lambda data: LanguageModel(data, "wikitext2", 2048, 6144),
}
