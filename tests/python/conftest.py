"""One PyTorch thread in the tests: their tensors are tiny, and threads that wait for each other on a busy machine cost
more than the work. Tests of threading set the number themselves."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
