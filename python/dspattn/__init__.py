"""Attention whose scores are pruned on the fly to N:M structured sparsity, as a drop-in for full attention.

* :func:`attention`, :func:`varlen_attention`: the functions, in the signature of PyTorch's own.
* :func:`attention_with_cache`: new queries against a cache, also of pages; :func:`value_sums` and
  :func:`update_value_sums` for ``rest="mean"``.
* :func:`merge`: joins attention over parts of the keys.
* :func:`norm_rope`: norm, rotation and joining of queries and keys before attention, in one pass.
* :func:`sddmm`, :func:`softmax`, :func:`spmm`: the paper's three steps, with the sparse matrix between them.
* :func:`block_attention`, :mod:`dspattn.block_masks`: blocked-ELL masks with N:M inside the blocks.
* :mod:`dspattn.zoo`: the other mechanisms of the paper's comparison, by name.
* :func:`apply`: prune a model layer by layer, with a check that it is so; :func:`restore` undoes it.
* :func:`propose`: which layers to leave dense, measured on the user's own inputs.
* :class:`use`: redirect every ``scaled_dot_product_attention`` call of a block.
* Hugging Face transformers: ``model.set_attn_implementation("dspattn_2_4")``; see
  :mod:`dspattn.integrations.huggingface`.
* :class:`dspattn.nn.MultiheadAttention`: with the parameters of ``torch.nn.MultiheadAttention``.
* :func:`report`: a page that shows what pruning does inside a model.
"""

from __future__ import annotations

from . import block_masks, nn, sparse, zoo
from .block_masks import block_attention
from .caching import attention_with_cache, update_value_sums, value_sums
from .errors import DspattnError
from .functional import attention, varlen_attention
from .integrations import _on_import
from .integrations.sdpa import use
from .merging import merge
from .preparing import norm_rope
from .proposing import propose
from .reporting import report
from .sparse import sddmm, softmax, spmm
from .switching import apply, restore
from .weights import attention_weights

__version__ = "0.1.0"
__all__ = [
    "DspattnError",
    "apply",
    "attention",
    "attention_weights",
    "attention_with_cache",
    "block_attention",
    "block_masks",
    "merge",
    "nn",
    "norm_rope",
    "propose",
    "report",
    "restore",
    "sddmm",
    "softmax",
    "sparse",
    "spmm",
    "update_value_sums",
    "use",
    "value_sums",
    "varlen_attention",
    "zoo",
]

_on_import.watch()
