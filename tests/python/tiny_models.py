"""Small randomly initialised transformers models and a tokenizer for them: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

# The first transformers whose models look their attention up by name; older ones are refused with that reason.
LOOKED_UP_SINCE = {"T5": "5.15", "ModernBert": "5.5"}

WORDS = [
    *("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "seven", "wizards", "make", "toxic"),
    *("brew", "and", "nobody", "in", "</script>", "<b>", "&", "it", "knows", "why", "rivers", "run", "to", "seas"),
]


def skip_if_not_looked_up(family: str) -> None:
    """Skip a test of a family whose attention the installed transformers does not look up by name."""
    pytest.importorskip("transformers", minversion=LOOKED_UP_SINCE.get(family, "5.0"))


def text(words: int) -> str:
    """A text of so many words, the same every time."""
    return " ".join(WORDS[(index * 7 + index // 9) % len(WORDS)] for index in range(words))


def tokenizer() -> Any:
    """One token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(["[UNK]", "[PAD]", *sorted(set(WORDS))])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]")


def encoder(layers: int = 2, heads: int = 3) -> Any:
    """BERT: no mask, learned positions."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=64,
        hidden_size=heads * 16,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=64,
        max_position_embeddings=512,
        initializer_range=0.15,
    )
    return BertModel(config).eval()


def decoder(layers: int = 2, heads: int = 4, kv_heads: int = 2) -> Any:
    """Llama: causal, rotary positions, grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=heads * 16,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=64,
        max_position_embeddings=512,
        initializer_range=0.15,
    )
    return LlamaForCausalLM(config).eval()
