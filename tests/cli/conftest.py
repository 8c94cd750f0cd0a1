"""Runs the program as a user would. DSPATTN_CLI names it; `make test` sets that."""

import subprocess

import pytest
from programs import built


@pytest.fixture(scope="session")
def program():
    return built("apps/dspattn", "DSPATTN_CLI")


@pytest.fixture
def dspattn(program, tmp_path):
    """Call with arguments; returns the finished process with text output. Runs in an empty folder."""

    def call(*arguments, timeout=120):
        return subprocess.run(
            [program, *map(str, arguments)], cwd=tmp_path, capture_output=True, text=True, timeout=timeout
        )

    return call
