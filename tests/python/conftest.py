"""One PyTorch thread in the tests: their tensors are tiny, and threads that wait for each other on a busy machine cost
more than the work. Tests of threading set the number themselves, and so do programs that tests call; it does not last
longer than the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    torch.set_num_threads(1)
