"""Memory layouts of the tensors that models hand to attention: views of memory that holds more, or less, than they
show.

The memory is made in its type: a view that is converted becomes a copy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Make = Callable[..., Tensor]  # of a shape, contiguous
Shape = tuple[int, ...]

# The least number of dimensions, and the view of [..., n, d] that is made.
LAYOUTS: dict[str, tuple[int, Callable[[Make, Shape], Tensor]]] = {
    "contiguous": (1, lambda make, s: make(*s)),
    "heads inside": (3, lambda make, s: make(*s[:-3], s[-2], s[-3], s[-1]).transpose(-3, -2)),
    "rows begin at any element": (2, lambda make, s: make(*s[:-2], s[-2] + 2, s[-1] + 3)[..., 1:-1, 2:-1]),
    "rows begin at the fourth element": (2, lambda make, s: make(*s[:-1], s[-1] + 8)[..., 4:-4]),
    "rows begin at the eighth element": (2, lambda make, s: make(*s[:-1], s[-1] + 8)[..., 8:]),
    "every second row": (2, lambda make, s: make(*s[:-2], 2 * s[-2], s[-1])[..., ::2, :]),
    "rows of a longer tensor": (2, lambda make, s: make(*s[:-2], s[-2] + 5, s[-1])[..., 3:-2, :]),
    "one batch for all": (4, lambda make, s: make(1, *s[1:]).expand(s)),
    "one head for all": (3, lambda make, s: make(*s[:-3], 1, *s[-2:]).expand(s)),
    "last dimension strided": (1, lambda make, s: make(*s[:-1], 2 * s[-1])[..., ::2]),
    "last dimensions exchanged": (2, lambda make, s: make(*s[:-2], s[-1], s[-2]).transpose(-1, -2)),
}


def drawn(make: Make, shape: Shape, choice: Callable[[list[str]], str]) -> tuple[Tensor, str]:
    """A tensor of the shape in a layout that it can have, and the layout's name."""
    name = choice([name for name, (least, _) in LAYOUTS.items() if len(shape) >= least])
    tensor = LAYOUTS[name][1](make, shape)
    assert tensor.shape == torch.Size(shape), name
    return tensor, name
