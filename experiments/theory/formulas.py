"""Runs the C++ program for every number that the pictures draw; nothing is computed here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from . import result_files
from .correlation import as_option, fit_mixture

PROGRAM_VARIABLE = "DSPATTN_CLI"
MODELS = {"MiniLM": "maps_minilm.json", "SmolLM2-135M": "maps_smollm2.json"}


def find_program(chosen: str | None = None) -> Path:
    """The program: ``chosen``, else ``$DSPATTN_CLI``, else a build of this source tree, else on the path."""
    named = chosen or os.environ.get(PROGRAM_VARIABLE)
    root = Path(__file__).resolve().parents[2]
    on_path = shutil.which("dspattn")
    places = [Path(named)] if named else [root / "build" / "release" / "apps" / "dspattn", Path(on_path or "dspattn")]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(
        f"the program dspattn was not found at {' or '.join(map(str, places))}: run `make build`, or name it with --cli"
    )


def _ask(program: Path, *arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [str(program), "theory", *arguments, "--json", "-"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"dspattn theory {' '.join(arguments)} failed: {done.stderr.strip()}")
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


def _numbers(values: Any) -> str:
    return ",".join(f"{value:.6g}" for value in values)


def evaluate_formulas(program: Path, out: Path) -> None:
    """theory.json (tables and curves) and prediction.json (measured heads), from the maps already measured."""
    sets: dict[str, tuple[str, ...]] = {
        "tables": ("--monte-carlo", "--keys", "512", "--rows", "400"),
        "page": ("--section", "quality", "--p", "1,2,4", "--density", "0.02,0.5", "--keys", "1024"),
        "spread": ("--section", "quality", "--p", _numbers(np.arange(0.25, 10.01, 0.25)), "--keys", "1024",
                   "--density", "0.02,0.63"),
        "simulated": ("--section", "quality", "--p", "0.5,1,2,3,4,5,6,7,8,9", "--keys", "1024", "--density", "0.02",
                      "--pattern", "1:2,2:4", "--monte-carlo", "--rows", "800"),
        "density": ("--section", "speed", "--keys", "4096",
                    "--density", _numbers(np.geomspace(0.005, 1.0, 60))),
    }  # fmt: skip
    for keys in (128, 256, 512, 1024, 2048, 4096, 8192, 16384):
        for dim in (64, 128):
            sets[f"length {keys} {dim}"] = (
                "--section", "speed", "--keys", str(keys), "--head-dim", str(dim), "--density", "0.05",
            )  # fmt: skip
    for keys in (384, 1024, 4096):
        sets[f"overtakes {keys}"] = ("--section", "paper", "--keys", str(keys))
    predictions: list[dict[str, Any]] = []
    mixtures: dict[str, str] = {}
    for model, file in MODELS.items():
        maps = result_files.read(out / file)
        predictions += _ask(program, "--predict", str(out / file))
        mixtures[model] = as_option(fit_mixture(maps["lags"], maps["mean_correlation"]))
        median = float(np.median([row["sigma"] for row in maps["rows"]]))
        sets[f"heads {model}"] = (
            "--section", "quality", "--sigma", f"1,{median:.4g}", "--p", _numbers(maps["powers"]), "--keys", "384",
            "--density", "0.02,0.05,0.1,0.25,0.5,0.63",
        )  # fmt: skip
        sets[f"grouping {model}"] = (
            "--section", "grouping", "--correlation", mixtures[model], "--p", "1", "--pattern", "1:2,2:4",
            "--sigma", "0.25,0.5,1,1.5,2,2.5,3,4,5", "--keys", "384", "--rows", "150", "--monte-carlo",
        )  # fmt: skip
    rows = [{"set": name, **row} for name, arguments in sets.items() for row in _ask(program, *arguments)]
    result_files.write(
        out / "theory.json", rows, {}, mixtures=mixtures, arguments={n: " ".join(a) for n, a in sets.items()}
    )
    result_files.write(out / "prediction.json", predictions, {})
