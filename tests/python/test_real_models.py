"""The package and the plain emulation inside the two pretrained models: the same vectors, the same perplexity.

Skipped where the models are not in the cache; `python -m dspattn.pretrained` puts them there.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
from dspattn import demo, evaluate, pretrained
from experiments.quality import emulation
from test_pretrained import cached

needs_minilm = pytest.mark.skipif(not cached(pretrained.MINILM), reason="MiniLM is not in the cache")
needs_smollm2 = pytest.mark.skipif(not cached(pretrained.SMOLLM2), reason="SmolLM2-135M is not in the cache")
NAMES = {
    ("2:4", "interleaved"): "dspattn_2_4",
    ("1:2", "consecutive"): "dspattn_1_2_consecutive",
}


@needs_minilm
@pytest.mark.parametrize("cell", NAMES, ids=NAMES.get)
def test_sentence_vectors(cell: tuple[str, str]) -> None:
    model, tokenizer = pretrained.load_minilm(progress=False)
    texts = demo.load_texts().passages[:4]
    dense = evaluate.embed(model, tokenizer, texts)
    model.set_attn_implementation(NAMES[cell])
    own = evaluate.embed(model, tokenizer, texts)
    model.set_attn_implementation(emulation.transformers_name(*cell))
    judged = evaluate.embed(model, tokenizer, texts)
    assert float((own * judged).sum(-1).min()) > 0.9999
    assert float((own * dense).sum(-1).max()) < 0.9995  # something was pruned


@needs_smollm2
@pytest.mark.parametrize("cell", NAMES, ids=NAMES.get)
def test_perplexity(cell: tuple[str, str]) -> None:
    model, tokenizer = pretrained.load_smollm2(progress=False)
    window = torch.tensor(tokenizer(demo.load_texts().running)["input_ids"][:300])
    dense, _ = evaluate.token_losses(model, window)
    model.set_attn_implementation(NAMES[cell])
    own, _ = evaluate.token_losses(model, window)
    model.set_attn_implementation(emulation.transformers_name(*cell))
    judged, _ = evaluate.token_losses(model, window)
    # Rounding may turn a near tie and move single losses; the text's perplexity hardly moves.
    assert float((own - judged).abs().mean()) < 0.002
    assert float((own - dense).abs().mean()) > 0.01
