"""Result files: one JSON shape for every measurement, written by what measured it and by nothing else."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


def _git(*arguments: str) -> str:
    here = Path(__file__).resolve().parent
    done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _revision() -> str:
    """The git revision of this source tree, -dirty when its code has uncommitted changes; outside git what
    DSPATTN_COMMIT says, else "unknown"."""
    if named := os.environ.get("DSPATTN_COMMIT"):
        return named
    revision = _git("rev-parse", "--short=12", "HEAD")
    if not revision:
        return "unknown"
    # Results and pictures are what a run writes; they do not make the code that wrote them another one.
    changed = _git(
        "status", "--porcelain", "--", ":/", ":(top,exclude,glob)experiments/*/results/**", ":(top,exclude)docs"
    )
    return revision + ("-dirty" if changed else "")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _command() -> str:
    """The command line without the places of one machine: the data are DATA, the tokens TOKENS, the program dspattn."""
    arguments = list(sys.argv[1:])
    for option, name in (("--data", "DATA"), ("--tokens", "TOKENS"), ("--cli", "dspattn"), ("--results", "RESULTS")):
        if option in arguments[:-1]:
            arguments[arguments.index(option) + 1] = name
    return " ".join(["python -m experiments.theory", *map(shlex.quote, arguments)])


def write(
    path: Path, rows: list[dict[str, Any]], versions: dict[str, str], device: str | None = None, **more: Any
) -> None:
    """Writes a result file; ``more`` are further top-level entries such as the powers that ``rows`` refer to. The
    device is the processor where none is named."""
    content: dict[str, Any] = {
        "command": _command(),
        "commit": _revision(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": {"name": device or _processor(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), **versions},
        **more,
    }
    # One row a line: small files, and differences that can be read.
    lines = ",\n    ".join(json.dumps(row) for row in rows)
    head = json.dumps(content, indent=1)[:-2]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "rows": [\n    {lines}\n ]\n}}\n')


def read(path: Path) -> dict[str, Any]:
    """A result file; a missing or broken one raises an error that says how to make it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such result file; `python -m experiments.theory all` writes it")
    try:
        content: Any = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise ValueError(f"{path}: expected an object with a list `rows`")
    return content


TASKS = ("tasks_smollm2.json", "tasks_minilm.json")


def read_tasks(folder: Path) -> dict[str, Any]:
    """Both models' tasks as one: their rows, powers, and numbers of items."""
    found = [read(folder / name) for name in TASKS]
    if found[0]["powers"] != found[1]["powers"]:
        raise ValueError(f"{folder}: expected the same powers in {' and '.join(TASKS)}")
    return {
        "powers": found[0]["powers"],
        "rows": [row for content in found for row in content["rows"]],
        "counts": {task: count for content in found for task, count in content["counts"].items()},
    }
