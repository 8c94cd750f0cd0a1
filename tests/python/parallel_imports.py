"""What the processes of parallel_pool.py have imported when they are forked."""

import contextlib

import torch.distributed  # noqa: F401

import dspattn.parallel  # noqa: F401

with contextlib.suppress(ImportError):
    import transformers.models.bert.modeling_bert
    import transformers.models.llama.modeling_llama
    import transformers.models.mistral.modeling_mistral  # noqa: F401
