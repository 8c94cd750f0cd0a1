"""Every family of transformers, as one small random model: with ``dspattn_dense`` it gives what it gave before, or the
name is refused, at load and at set. None stays dense without a word, none gets wrong."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import dspattn

pytest.importorskip("transformers", minversion="5.0")
from transformers import AttentionInterface
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

import tiny_families
from dspattn.integrations import huggingface

SAMPLE = (
    *("llama", "mistral", "qwen3", "gemma3_text", "phi3", "gpt2", "opt", "stablelm", "gpt_neox", "olmo2", "cohere"),
    *("deepseek_v3", "mixtral", "bert", "roberta", "modernbert", "electra", "distilbert", "t5", "bart", "whisper"),
    *("vit", "dinov2", "clip_text_model", "siglip_vision_model", "wav2vec2", "qwen2_5_vl_vision", "beit"),
    *("gemma2", "gpt_oss", "bloom", "falcon", "xglm", "mpt", "gptj", "deberta", "xlnet", "led", "mpnet", "wavlm"),
)


class OwnAttention(TorchFunctionMode):
    """Counts what looks like attention that did not come to dspattn: softmax or PyTorch's own, over rows of scores."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("softmax", "scaled_dot_product_attention", "multi_head_attention_forward"):
            first = args[0] if args else next(iter(kwargs.values()))
            self.calls += first.dim() >= 4 and first.shape[-2] > 1
        return func(*args, **kwargs)


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many attention calls ``dspattn_dense`` answers."""
    calls = [0]
    inner = huggingface.make_attention("dense", "interleaved")

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        with torch._C.DisableTorchFunction():
            return inner(*args, **kwargs)

    AttentionInterface.register("dspattn_dense", counting)
    try:
        yield calls
    finally:
        huggingface.register_pattern("dense")


def run(model: Any, inputs: dict[str, Any]) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    with torch.no_grad(), OwnAttention() as own:
        return tiny_families.tensors_of(model(**copy.deepcopy(inputs))), own.calls


def difference(stock: torch.Tensor, ours: torch.Tensor, inputs: dict[str, Any]) -> float:
    """The largest one in units of the largest value above 1, tokens of padding left out."""
    if stock.numel() == 0:
        return 0.0
    same = (stock == ours) | (stock.isnan() & ours.isnan())
    apart = torch.where(same, 0.0, (stock - ours).abs().nan_to_num(nan=float("inf")))
    mask = inputs.get("attention_mask")
    if mask is not None and stock.dim() > 1 and stock.shape[:2] == mask.shape:
        apart = apart[mask.bool()]
    return float(apart.max()) / max(1.0, float(stock.abs().nan_to_num(posinf=1.0).max()))


def rounding(model: Any, stock: list[torch.Tensor], inputs: dict[str, Any]) -> float:
    """How far apart two implementations of transformers itself are: random recurrent layers amplify roundings."""
    model.set_attn_implementation("eager")
    eager, _ = run(model, inputs)
    return max(difference(a, b, inputs) for a, b in zip(stock, eager, strict=True))


def check(family: str) -> str:
    """What became of a family: refused, equal, or without attention; an assertion for anything else."""
    with tiny_families.quiet(), warnings.catch_warnings(), counted() as calls:
        warnings.simplefilter("ignore")
        model = tiny_families.build(family)
        try:
            model.set_attn_implementation("dspattn_dense")
        except dspattn.DspattnError as error:
            assert "attn_implementation: expected one that" in str(error)
            with pytest.raises(dspattn.DspattnError, match="attn_implementation"):
                tiny_families.build(family, attn_implementation="dspattn_dense")
            return "refused"
        model = tiny_families.build(family)  # as it was: not every part takes its own default back by name
        inputs, _ = tiny_families.runnable_inputs(model)
        stock, _ = run(model, inputs)
        model.set_attn_implementation("dspattn_dense")
        calls[0] = 0
        ours, own = run(model, inputs)
        assert len(stock) == len(ours) > 0
        apart = max(difference(a, b, inputs) for a, b in zip(stock, ours, strict=True))
        assert apart < 1e-4 or apart < rounding(model, stock, inputs), f"{family}: with dspattn_dense outputs differ"
        if calls[0] == 0:
            assert own == 0, f"{family}: {own} attention calls, none of which reached dspattn_dense"
            return "without attention"
        return "equal"


@pytest.mark.parametrize("family", SAMPLE)
def test_sample(family: str) -> None:
    assert check(family) in ("equal", "refused")


@pytest.mark.rare
@pytest.mark.parametrize("family", [name for name in MODEL_MAPPING_NAMES if name not in SAMPLE])
def test_family(family: str) -> None:
    try:
        check(family)
    except tiny_families.NotMadeError as error:
        pytest.skip(f"{family} is not checked: {str(error)[:120]}")
