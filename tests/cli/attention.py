"""N:M attention in plain NumPy, written from docs/notation.md alone: the judge of what the program writes."""

import numpy as np


def groups(count, group, grouping):
    """Lists of key indices that compete with each other."""
    if grouping == "consecutive":
        return [list(range(start, min(start + group, count))) for start in range(0, count, group)]
    stride = 128 // group
    lists = []
    for block in range(0, count, 128):
        for first in range(stride):
            keys = [block + first + stride * element for element in range(group)]
            lists.append([key for key in keys if key < count])
    return lists


def attention(q, k, v, keep=2, group=4, grouping="interleaved", scale=None, visible=None, bias=None, mean=None):
    """q [..., n_q, d], k [..., n_k, d], v [..., n_k, d_v] -> (out, lse) in float64. visible: bool [..., n_q, n_k].

    mean: of V, [..., n_q or 1, d_v], which the pruned keys bring."""
    q, k, v = (np.asarray(array, np.float64) for array in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * (q @ np.swapaxes(k, -1, -2))
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = np.where(visible, scores, -np.inf)
    pruned = np.full_like(scores, -np.inf)
    for keys in groups(scores.shape[-1], group, grouping):
        part = scores[..., keys]
        # A stable sort of the negated scores: ties keep the lower index.
        order = np.argsort(-part, axis=-1, kind="stable")[..., :keep]
        kept = np.zeros(part.shape, bool)
        np.put_along_axis(kept, order, True, axis=-1)
        pruned[..., keys] = np.where(kept, part, -np.inf)
    lost = np.where(np.isfinite(pruned) | (mean is None), -np.inf, scores)
    top = np.maximum(pruned, lost).max(axis=-1, keepdims=True, initial=-np.inf)
    finite_top = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(pruned - finite_top)
    rest = np.exp(lost - finite_top).sum(axis=-1, keepdims=True)
    total = weights.sum(axis=-1, keepdims=True) + rest
    out = (weights @ v + (0.0 if mean is None else rest * mean)) / np.where(total > 0, total, 1.0)
    with np.errstate(divide="ignore"):
        lse = np.log(total[..., 0]) + finite_top[..., 0]
    return out, lse
