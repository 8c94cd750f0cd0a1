"""A kernel folder as Hugging Face's hub has them: functions, layout, transformers, continuous batching."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import dspattn
from dspattn.integrations import hub_kernel

NAME = "dspattn/flash-1-2"
PROMPTS = [[3 + (7 * i + i // 5) % 50 for i in range(n)] for n in (150, 90)]


def imported(folder: Path) -> ModuleType:
    """As the kernels package does with the build that fits the system."""
    build = folder / "build" / "torch-cpu"
    name = json.loads((build / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, build / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: Any) -> ModuleType:
    return imported(hub_kernel.write(tmp_path_factory.mktemp("kernel"), "1:2"))


def test_functions(kernel: ModuleType) -> None:
    q, k, v = torch.randn(2, 9, 4, 16), torch.randn(2, 150, 2, 16), torch.randn(2, 150, 2, 16)
    swapped = [t.transpose(1, 2) for t in (q, k, v)]
    for window in (None, (20, 3), (None, 5)):
        size = (-1, -1) if window is None else tuple(-1 if side is None else side for side in window)
        wanted = dspattn.attention(
            *swapped, is_causal=True, scale=0.3, enable_gqa=True, window=window, alignment="bottom_right", pattern="1:2"
        ).transpose(1, 2)
        assert torch.equal(kernel.flash_attn_func(q, k, v, 0.0, 0.3, True, size), wanted)
        cu_q, cu_k = torch.tensor([0, 9, 18]), torch.tensor([0, 150, 300])
        packed = kernel.flash_attn_varlen_func(
            *(t.flatten(0, 1) for t in (q, k, v)), cu_q, cu_k, 9, 150, softmax_scale=0.3, causal=True, window_size=size
        )
        torch.testing.assert_close(packed, wanted.flatten(0, 1))
    sinks = torch.randn(4)
    wanted = dspattn.attention(*swapped, enable_gqa=True, soft_cap=2.0, sinks=sinks, pattern="1:2").transpose(1, 2)
    assert torch.equal(kernel.flash_attn_func(q, k, v, softcap=2.0, s_aux=sinks), wanted)
    with pytest.raises(dspattn.DspattnError, match="pattern"):
        hub_kernel.write("nowhere", "5:4")


def test_layout(tmp_path: Path) -> None:
    package = pytest.importorskip("kernels", reason="the kernels package is not installed", exc_type=ImportError)
    loaded = package.get_local_kernel(hub_kernel.write(tmp_path, "2:4", "consecutive"))
    q = torch.randn(1, 20, 2, 16)
    wanted = dspattn.attention(*[q.transpose(1, 2)] * 3, pattern="2:4", grouping="consecutive").transpose(1, 2)
    assert torch.equal(loaded.flash_attn_func(q, q, q), wanted)


class TestTransformers:
    """transformers' own loader, with the download replaced by the folder; the kernels package need not be there."""

    @pytest.fixture
    def model(self, kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
        hub = pytest.importorskip("transformers.integrations.hub_kernels", reason="transformers is not installed")
        import tiny_models

        monkeypatch.setattr(hub, "is_kernels_available", lambda: True)
        monkeypatch.setattr(hub, "get_kernel", lambda repo, **options: {NAME: kernel}[repo])
        assert hub.load_and_register_attn_kernel(NAME) is kernel
        return tiny_models.decoder()

    def test_logits(self, model: Any) -> None:
        ids = torch.tensor(PROMPTS[:1])
        logits = {}
        for name in ("sdpa", "dspattn_1_2", NAME):
            model.set_attn_implementation(name)
            with torch.no_grad():
                logits[name] = model(ids).logits
        torch.testing.assert_close(logits[NAME], logits["dspattn_1_2"])
        assert (logits[NAME] - logits["sdpa"]).abs().max() > 1e-3

    def test_continuous_batching(self, model: Any) -> None:
        """Through the packed path the tokens are those of each prompt alone; our other names are refused."""
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        options = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=1, eos_token_id=-1)
        model.set_attn_implementation("dspattn_1_2")
        with pytest.raises(ValueError, match="dspattn_1_2 is not supported for continuous batching"):
            model.generate_batch(PROMPTS, generation_config=options)
        alone = [model.generate(torch.tensor([p]), generation_config=options)[0, len(p) :].tolist() for p in PROMPTS]
        model.set_attn_implementation(NAME)
        small = ContinuousBatchingConfig(page_size=16, num_blocks=40, max_batch_tokens=256)  # else most of the memory
        batched = model.generate_batch(
            PROMPTS, generation_config=options, continuous_batching_config=small, warmup=False
        )
        assert sorted(result.generated_tokens for result in batched.values()) == sorted(alone)


def test_a_paged_cache_is_not_passed_over() -> None:
    """What continuous batching hands down beside keys and values: the registered names do not leave it out."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from dspattn.integrations.huggingface import make_attention

    module = torch.nn.Module()
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(dspattn.DspattnError, match="cache"):
        make_attention("1:2", "interleaved")(module, q, q, q, None, scaling=0.25, cache=object())
