"""Runs the program as a user would. DSPATTN_CLI names it; `make test` sets that."""

import os
import subprocess
from pathlib import Path

import pytest

DEFAULT = Path(__file__).resolve().parents[2] / "build" / "release" / "apps" / "dspattn"


@pytest.fixture(scope="session")
def program():
    path = Path(os.environ.get("DSPATTN_CLI", DEFAULT))
    if not path.is_file():
        pytest.fail(f"{path} is not built; run make build, or name the program in DSPATTN_CLI")
    return path


@pytest.fixture
def dspattn(program, tmp_path):
    """Call with arguments; returns the finished process with text output. Runs in an empty folder."""

    def call(*arguments, timeout=120):
        return subprocess.run(
            [program, *map(str, arguments)], cwd=tmp_path, capture_output=True, text=True, timeout=timeout
        )

    return call
