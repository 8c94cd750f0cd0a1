"""Accuracy of pruned attention on real data, without any fine-tuning.

    python experiments/quality/run.py --data FOLDER

runs every task with dense attention and with each pattern in both groupings, and with `--rests drop mean` also with the
weight of pruned keys given to the mean of the values, and writes one JSON file a task. What a
model computed for one cell is kept in the work folder, so a run that was stopped goes on where it was; the figures and
their intervals are worked out from there. `--check` compares with the expectations and exits 1 when one is missed.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from quality_expected import EXPECTATIONS  # noqa: E402
from quality_tasks import TASKS, DataError, Items, Squad, Task  # noqa: E402
from tqdm import tqdm  # noqa: E402

from dspattn.pretrained import PretrainedError, load_minilm, load_smollm2  # noqa: E402


class Cell(NamedTuple):
    pattern: str
    grouping: str
    rest: str = "drop"

    def __str__(self) -> str:
        return " ".join([self.pattern] + [self.grouping] * (self.grouping != "none") + ["mean"] * (self.rest == "mean"))


DENSE = Cell("dense", "none")
PATTERNS = ("2:4", "1:2", "1:4", "4:8")
GROUPINGS = ("interleaved", "consecutive")
RESTS = ("drop", "mean")
ALL_CELLS = [DENSE, *(Cell(*names) for names in itertools.product(PATTERNS, GROUPINGS, RESTS))]


def attention_name(cell: Cell, implementation: str) -> str:
    """The name transformers knows the cell's attention by. Dense is PyTorch's own attention: the stock model."""
    if cell == DENSE:
        return "sdpa"
    if implementation == "emulation":
        import emulation

        return str(emulation.transformers_name(cell.pattern, cell.grouping))
    parts = ["dspattn", cell.pattern.replace(":", "_")]
    return "_".join(parts + ["consecutive"] * (cell.grouping == "consecutive") + ["mean"] * (cell.rest == "mean"))


def commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False).stdout

    revision = git("rev-parse", "--short=12", "HEAD").strip() or "unknown"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "include", "bindings", "python")
    return revision + ("-dirty" if changed.strip() else "")


def device() -> dict[str, Any]:
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        models = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return {"name": name, "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def versions() -> dict[str, str]:
    import transformers

    found = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    return {**found, "python": platform.python_version()}


class Models:
    """Loads each model once and switches its attention."""

    def __init__(self, cache: str | None) -> None:
        self.cache = cache
        self.loaded: dict[str, tuple[Any, Any]] = {}

    def get(self, name: str, attention: str) -> tuple[Any, Any]:
        if name not in self.loaded:
            self.loaded.clear()  # one at a time in memory
            load = load_minilm if name == "MiniLM" else load_smollm2
            self.loaded[name] = load(folder=self.cache)
        if attention.startswith("dspattn"):
            import dspattn  # noqa: F401  (registers its attention functions)
        model, tokenizer = self.loaded[name]
        model.set_attn_implementation(attention)
        return model, tokenizer


def work_file(work: Path, task: Task, cell: Cell, implementation: str) -> Path:
    owner = "sdpa" if cell == DENSE else implementation
    return work / owner / task.name / f"{str(cell).replace(':', '_').replace(' ', '_')}.npz"


def compute(task: Task, cell: Cell, models: Models, path: Path, implementation: str) -> None:
    """Runs the model for one cell and keeps what it gave."""
    model, tokenizer = models.get(task.model, attention_name(cell, implementation))
    label = f"{task.name} {cell}"
    started = time.perf_counter()
    with tqdm(total=task.size(), desc=f"{label:34}", unit=" items", mininterval=1.0) as bar:
        items = task.items(model, tokenizer, bar.update, path.with_suffix(""))
    items["seconds"] = np.array([time.perf_counter() - started])
    items["commit"] = np.array([commit()])
    if isinstance(task, Squad) and cell == DENSE:
        with tqdm(total=len(task.questions), desc=f"{task.name + ' questions':34}", unit=" items") as bar:
            items.update(task.question_items(model, tokenizer, bar.update))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, allow_pickle=False, **items)
    partial.rename(path)
    shutil.rmtree(path.with_suffix(""), ignore_errors=True)


def read_items(path: Path) -> Items:
    with np.load(path) as stored:
        return {name: stored[name] for name in stored.files}


def rows_of(task: Task, cells: list[Cell], work: Path, implementation: str) -> list[dict[str, Any]]:
    """Every row that can be worked out from what is in the work folder."""
    dense_path = work_file(work, task, DENSE, implementation)
    if not dense_path.is_file():
        return []
    dense = read_items(dense_path)
    rows: list[dict[str, Any]] = []
    for cell in cells:
        path = work_file(work, task, cell, implementation)
        if not path.is_file():
            continue
        own = read_items(path)
        shared: dict[str, Any] = {"model": task.model, "task": task.name, **task.about}
        if "longest" in own:
            shared["longest_tokens"] = int(own["longest"][0])
        if "lengths" in own:
            shared["mean_tokens"] = round(float(own["lengths"].mean()), 1)
        for figure in task.figures(own, dense):
            row = {**shared, **cell._asdict(), **asdict(figure)}
            row |= {
                "implementation": "torch sdpa" if cell == DENSE else implementation,
                "seconds": round(float(own["seconds"][0]), 1),
                "commit": str(own["commit"][0]),
            }
            rows.append({key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()})
    return rows


def command_line() -> str:
    """The command as someone else would type it: folders of this machine are left out, that of the data is FOLDER."""
    words = ["python", "experiments/quality/run.py", "--data", "FOLDER"]
    skip = False
    for word in sys.argv[1:]:
        if not skip and word not in ("--data", "--work", "--results", "--cache", "--no-compute"):
            words.append(word)
        skip = word in ("--data", "--work", "--results", "--cache")
    return shlex.join(words)


def write_results(path: Path, rows: list[dict[str, Any]]) -> None:
    content = {
        "command": command_line(),
        "commit": ", ".join(dict.fromkeys(row["commit"] for row in rows if row["pattern"] != "dense")) or commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device(),
        "versions": versions(),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def check(results: Path, names: list[str]) -> int:
    """Compares committed or fresh results with the expectations; the number of cells out of tolerance or missing."""
    rows: dict[tuple[str, str, str, str], float] = {}
    for name in names:
        path = results / f"{name}.json"
        if path.is_file():
            for row in json.loads(path.read_text())["rows"]:
                if row.get("rest") == "mean":
                    continue  # of which nothing was expected
                rows[row["task"], row["metric"], row["pattern"], row["grouping"]] = row["value"]
    wrong = 0
    for cell in (cell for cell in EXPECTATIONS if cell.task in names):
        found = rows.get((cell.task, cell.metric, cell.pattern, cell.grouping))
        good = found is not None and abs(found - cell.value) <= cell.tolerance + 1e-9
        wrong += not good
        label = f"{cell.task} {cell.metric} {cell.pattern} {'' if cell.grouping == 'none' else cell.grouping}"
        shown = "missing" if found is None else f"{found:.4f}"
        print(f"{'ok  ' if good else 'MISS'} {label:56} expected {cell.value:9.4f} ± {cell.tolerance:.4f}  got {shown}")
    print(f"{wrong} cell(s) out of tolerance or missing" if wrong else "every expectation is met")
    return wrong


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with stsb, squad, wikitext2 and imdb (see README.md)")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS), metavar="TASK")
    parser.add_argument("--patterns", nargs="+", default=list(PATTERNS), choices=PATTERNS, help="besides dense")
    parser.add_argument("--groupings", nargs="+", default=list(GROUPINGS), choices=GROUPINGS)
    parser.add_argument("--rests", nargs="+", default=["drop"], choices=RESTS)
    parser.add_argument("--implementation", default="dspattn", choices=("dspattn", "emulation"))
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the JSON files")
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "quality", help="folder of what is kept on the way")
    parser.add_argument("--cache", help="folder of the models (default: $DSPATTN_CACHE or ~/.cache/dspattn)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only-dense", action="store_true", help="compute the dense cells and stop")
    parser.add_argument("--no-compute", action="store_true", help="only write the results of the cells that are kept")
    parser.add_argument("--check", action="store_true", help="compare with the expectations; without --data, only that")
    options = parser.parse_args(arguments)
    if options.data is None and not options.check:
        parser.error("--data: expected a folder with the data sets (or --check to compare the committed results)")
    if options.implementation == "emulation" and "mean" in options.rests:
        parser.error("--rests: expected drop with --implementation emulation, got mean")
    if options.data is not None and not options.data.is_dir():
        parser.error(f"--data: expected a folder, got {options.data}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.data is not None:
        torch.set_num_threads(options.threads)
        cells = [DENSE]
        if not options.only_dense:
            chosen = itertools.product(options.patterns, options.groupings, options.rests)
            cells += [Cell(*names) for names in chosen]
        models = Models(options.cache)
        try:
            loaded = [TASKS[name](options.data) for name in options.tasks]
            for task in loaded:
                for cell in cells:
                    path = work_file(options.work, task, cell, options.implementation)
                    if not path.is_file() and not options.no_compute:
                        compute(task, cell, models, path, options.implementation)
                if not options.only_dense:
                    rows = rows_of(task, ALL_CELLS, options.work, options.implementation)
                    write_results(options.results / f"{task.name}.json", rows)
        except (DataError, PretrainedError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 1 if options.check and check(options.results, options.tasks) else 0


if __name__ == "__main__":
    sys.exit(main())
