"""Where the programs are that these tests run."""

import os
from pathlib import Path

import pytest

BUILD = Path(__file__).resolve().parents[2] / "build" / "release"


def built(place, variable):
    """A program of the release build, or the one that a variable names."""
    path = Path(os.environ.get(variable, BUILD / place))
    if not path.is_file():
        pytest.fail(f"{path} is not built; run make build, or name the program in {variable}")
    return path
