"""dspattn.nn.MultiheadAttention against torch.nn.MultiheadAttention."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch

import dspattn

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "other key and value sizes": {"kdim": 24, "vdim": 40},
    "bias_kv": {"add_bias_kv": True},
    "zero attention": {"add_zero_attn": True, "batch_first": True},
}


def pair(**options: Any) -> tuple[torch.nn.MultiheadAttention, dspattn.nn.MultiheadAttention]:
    torch.manual_seed(1)
    theirs = torch.nn.MultiheadAttention(64, 4, **options).eval()
    ours = dspattn.nn.MultiheadAttention(64, 4, **options, pattern="dense").eval()
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    return theirs, ours


@pytest.mark.parametrize("name", SHAPES)
def test_equals_torch_with_the_dense_pattern(name: str) -> None:
    options = SHAPES[name]
    theirs, ours = pair(**options)
    batch_first = options.get("batch_first", False)
    batch, n_q, n_k = 3, 7, 20
    q, k, v = (
        torch.randn(batch, n, d) if batch_first else torch.randn(n, batch, d)
        for n, d in ((n_q, 64), (n_k, options.get("kdim", 64)), (n_k, options.get("vdim", 64)))
    )
    padding = torch.zeros(batch, n_k, dtype=torch.bool)
    padding[1, 15:] = True
    masks = {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "boolean": {"attn_mask": torch.rand(n_q, n_k) > 0.6},
        "additive per head": {"attn_mask": torch.randn(batch * 4, n_q, n_k)},
        "both": {"attn_mask": torch.rand(n_q, n_k) > 0.8, "key_padding_mask": padding},
    }
    for mask_name, mask in masks.items():
        for need_weights, average in ((False, True), (True, True), (True, False)):
            given = {**mask, "need_weights": need_weights, "average_attn_weights": average}
            out, weights = ours(q, k, v, **given)
            wanted, wanted_weights = theirs(q, k, v, **given)
            torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4, msg=lambda m, n=mask_name: f"{n}: {m}")
            assert (weights is None) == (wanted_weights is None)
            if weights is not None:
                torch.testing.assert_close(weights, wanted_weights, atol=1e-5, rtol=1e-4)


def test_without_a_batch_and_causal_hint() -> None:
    theirs, ours = pair()
    x = torch.randn(9, 64)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(9)
    for given in ({}, {"attn_mask": mask, "is_causal": True, "need_weights": False}):
        out, weights = ours(x, x, x, **given)
        wanted, wanted_weights = theirs(x, x, x, **given)
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)
        assert weights is None or weights.shape == wanted_weights.shape


def test_pruned_module_prunes_and_trains() -> None:
    module = dspattn.nn.MultiheadAttention(64, 4, batch_first=True, pattern="2:4", grouping="consecutive")
    x = torch.randn(2, 40, 64, requires_grad=True)
    out, weights = module(x, x, x, average_attn_weights=False)
    assert ((weights.unflatten(-1, (10, 4)) > 0).sum(-1) == 2).all()
    out.sum().backward()
    assert x.grad is not None and all(p.grad is not None for p in module.parameters())
    assert "pattern='2:4'" in repr(module)


def test_inside_pytorch_layers() -> None:
    layer = torch.nn.TransformerEncoderLayer(64, 4, 96, batch_first=True, dropout=0.0).eval()
    x = torch.randn(2, 30, 64)
    with torch.no_grad():
        wanted = layer(x)
        pruned = dspattn.nn.MultiheadAttention(64, 4, batch_first=True, pattern="dense").eval()
        pruned.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = pruned
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            torch.testing.assert_close(layer(x), wanted, atol=1e-5, rtol=1e-4)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


def test_errors() -> None:
    module = dspattn.nn.MultiheadAttention(64, 4)
    x = torch.randn(5, 2, 64)
    with pytest.raises(dspattn.DspattnError, match="attn_mask"):
        module(x, x, x, is_causal=True)
    with pytest.raises(dspattn.DspattnError, match="pattern"):
        dspattn.nn.MultiheadAttention(64, 4, pattern="0:4")
    hidden = torch.zeros(5, 5, dtype=torch.bool)
    for call, reason in {
        lambda: module(
            x, x[:, 0], x[:, 0]
        ): r"query, key, value: expected 3 dimensions .*, got \[5, 2, 64\], \[5, 64\]",
        lambda: module(x[None], x[None], x[None]): "query, key, value: expected 3 dimensions of each",
        lambda: module(x[:, 0], x[:, 0], x[:, 0], key_padding_mask=hidden): r"key_padding_mask: .* got \[1, 5, 5\]",
        lambda: module(x, x, x, key_padding_mask=hidden[0]): r"key_padding_mask: .* got \[5\]",
        lambda: module(x, x, x, attn_mask=hidden[None, None]): "attn_mask: expected 2 or 3 dimensions",
    }.items():
        with pytest.raises(dspattn.DspattnError, match=reason):
            call()


@pytest.mark.parametrize("wrapped", [False, True], ids=["layer", "encoder"])
def test_inside_an_encoder_layer_it_prunes_in_inference_as_in_training(wrapped: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 2, 48, dropout=0.0, batch_first=True)
    plain = layer.self_attn
    layer.self_attn = dspattn.nn.MultiheadAttention(32, 2, batch_first=True, pattern="1:2")
    layer.self_attn.load_state_dict(plain.state_dict())
    model = torch.nn.TransformerEncoder(layer, 1) if wrapped else layer
    x = torch.randn(2, 150, 32)
    trained = model.train()(x).detach()
    with torch.inference_mode():
        deployed = copy.deepcopy(model).eval()(x)
    torch.testing.assert_close(deployed, trained, atol=1e-5, rtol=1e-4)
    layer.self_attn = plain
    with torch.inference_mode():
        assert (layer.eval()(x) - trained).abs().max() > 1e-3


def test_an_encoder_that_nests_padded_batches() -> None:
    """nn.TransformerEncoder does so in inference, whatever the layers' attention was exchanged for since."""
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 1).eval()
    x = torch.randn(2, 150, 32)
    hidden = torch.arange(150) >= torch.tensor([[90], [150]])
    dspattn.apply(encoder, "1:2", example=x)
    padded = encoder(x, src_key_padding_mask=hidden)
    with torch.no_grad():
        nested = encoder(x, src_key_padding_mask=hidden)
    torch.testing.assert_close(nested[~hidden], padded[~hidden])
    assert not nested[hidden].any(), "not by way of a nested tensor"
    parts = torch.nested.nested_tensor([torch.randn(5, 32), torch.randn(7, 32)])
    with pytest.raises(dspattn.DspattnError, match="nested one with batch_first that is key and value too"):
        encoder.layers[0].self_attn(parts, parts, x)


def test_its_signature_is_pytorchs() -> None:
    """What asks for it, as skip_init does, makes either module."""
    ours, theirs = dspattn.nn.MultiheadAttention, torch.nn.MultiheadAttention
    own, plain = (inspect.signature(module.__init__).parameters for module in (ours, theirs))
    assert list(own)[: len(plain)] == list(plain)
    assert all(own[name].default == parameter.default for name, parameter in plain.items())
    module = torch.nn.utils.skip_init(ours, 16, 2, 0.0, False, batch_first=True, pattern="1:2")
    assert (module.pattern, module.batch_first, module.in_proj_bias) == ("1:2", True, None)
