"""Other packages with dspattn under them, each as it is published; skipped where it is not installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dspattn


def moved(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


class TestDiffusers:
    @pytest.fixture
    def diffusers(self) -> Any:
        package = pytest.importorskip("diffusers", reason="diffusers is not installed", exc_type=ImportError)
        from dspattn.integrations.diffusers import register

        assert "dspattn_1_2" in register()
        return package

    def test_backend_by_name(self, diffusers: Any) -> None:
        torch.manual_seed(0)
        model = diffusers.FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
        ).eval()  # fmt: skip
        inputs = {
            "hidden_states": torch.randn(1, 128, 4),
            "encoder_hidden_states": torch.randn(1, 32, 32),
            "pooled_projections": torch.randn(1, 32),
            "timestep": torch.tensor([1.0]),
            "img_ids": torch.randn(128, 3),
            "txt_ids": torch.zeros(32, 3),
        }
        results = {}
        for backend in ("native", "dspattn_dense", "dspattn_1_2", "dspattn_2_4_consecutive"):
            model.set_attention_backend(backend)
            with torch.no_grad():
                results[backend] = model(**inputs).sample
        assert moved(results["native"], results["dspattn_dense"]) < 1e-4
        assert moved(results["native"], results["dspattn_1_2"]) > 1e-4
        assert moved(results["dspattn_1_2"], results["dspattn_2_4_consecutive"]) > 1e-4

    def test_flux_with_norm_rope(self, diffusers: Any) -> None:
        """Both kinds of blocks, with and without one product for the projections; whatever it cannot take."""
        from dspattn.integrations import _flux
        from dspattn.integrations.diffusers import fuse_norm_rope, unfuse_norm_rope

        torch.manual_seed(0)
        model = diffusers.FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
        ).eval()  # fmt: skip
        for name, parameter in model.named_parameters():
            if "norm_" in name and parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        inputs = {
            "hidden_states": torch.randn(2, 140, 4),
            "encoder_hidden_states": torch.randn(2, 12, 32),
            "pooled_projections": torch.randn(2, 32),
            "timestep": torch.tensor([1.0, 1.0]),
            "img_ids": torch.randn(140, 3),
            "txt_ids": torch.zeros(12, 3),
        }
        calls = [0]

        def counted(*args: Any, **named: Any) -> Any:
            calls[0] += 1
            return dspattn.norm_rope(*args, **named)

        def outputs() -> torch.Tensor:
            calls[0] = 0
            with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
                patched.setattr(_flux, "norm_rope", counted)
                return model(**inputs).sample

        model.set_attention_backend("native")  # diffusers gives models that name none the last one that was named
        stock = outputs()
        model.set_attention_backend("dspattn_dense")
        names = fuse_norm_rope(model)
        assert names == ["transformer_blocks.0.attn", *(f"single_transformer_blocks.{i}.attn" for i in range(2))]
        assert moved(stock, outputs()) < 1e-4 and calls[0] == 3
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            assert moved(stock, compiled(**inputs).sample) < 1e-4
        with pytest.raises(dspattn.DspattnError, match="diffusers' own processor, found none"):
            fuse_norm_rope(model)
        model.fuse_qkv_projections()
        assert moved(stock, outputs()) < 1e-4 and calls[0] == 3
        hook = model.transformer_blocks[0].attn.norm_q.register_forward_hook(lambda *_: None)
        assert moved(stock, outputs()) < 1e-4 and calls[0] == 2  # which would not see its norm
        hook.remove()
        key_norm = model.single_transformer_blocks[0].attn.norm_k
        key_norm.forward = key_norm.forward  # as offloading wraps it
        assert moved(stock, outputs()) < 1e-4 and calls[0] == 2
        del key_norm.forward
        model(**inputs).sample.sum().backward()  # gradients: diffusers' own operators
        assert model.transformer_blocks[0].attn.norm_added_k.weight.grad.abs().sum() > 0
        assert unfuse_norm_rope(model) == names
        model.set_attention_backend("native")
        assert moved(stock, outputs()) < 1e-4 and calls[0] == 0
        applied = dspattn.apply(model, "1:2", example=inputs)  # beside it
        fuse_norm_rope(model)
        assert len(applied.changed) == 3 and moved(stock, outputs()) > 1e-5 and calls[0] == 3

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_norm_rope_rounds_as_flux_does(self, diffusers: Any, dtype: torch.dtype) -> None:
        from dspattn.integrations import _flux

        torch.manual_seed(1)
        norms = [torch.nn.RMSNorm(16, eps=1e-6).to(dtype) for _ in range(2)]
        parts = [torch.randn(1, n, 2, 16).to(dtype) for n in (12, 40)]
        angles = (torch.rand(52, 8) * 6).repeat_interleave(2, -1)
        rotary = (angles.cos(), angles.sin())
        with torch.no_grad():
            for norm in norms:
                torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
            assert _flux._taken([*parts, *parts], [*norms, *norms], rotary)
            stock = _flux._as_before(parts, norms, rotary)
            weights = _flux._weights(norms)
            ours, _ = dspattn.norm_rope(
                parts, parts, query_weight=weights, key_weight=weights, eps=1e-6, cos=rotary[0], sin=rotary[1]
            )
        assert (ours != stock).float().mean() < 0.01
        assert moved(ours, stock) <= 2 * torch.finfo(dtype).eps * float(stock.abs().max())

    def test_a_pipeline_and_its_vae(self, diffusers: Any) -> None:
        """Attention modules of SD3 and of the VAE have processors of their own, past which a backend's name goes."""
        torch.manual_seed(0)
        transformer = diffusers.SD3Transformer2DModel(
            sample_size=32, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=64, out_channels=4,
        ).eval()  # fmt: skip
        vae = diffusers.AutoencoderKL(
            in_channels=3, out_channels=3, down_block_types=("DownEncoderBlock2D",), block_out_channels=(32,),
            up_block_types=("UpDecoderBlock2D",), layers_per_block=1, latent_channels=4, norm_num_groups=8,
            scaling_factor=1.0, shift_factor=0.0,
        ).eval()  # fmt: skip
        pipeline = diffusers.StableDiffusion3Pipeline(
            transformer=transformer, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=vae, text_encoder=None,
            tokenizer=None, text_encoder_2=None, tokenizer_2=None, text_encoder_3=None, tokenizer_3=None,
        )  # fmt: skip
        pipeline.set_progress_bar_config(disable=True)
        words = dict(prompt_embeds=torch.randn(1, 12, 32), pooled_prompt_embeds=torch.randn(1, 64), guidance_scale=1.0)
        latents = {
            "hidden_states": torch.randn(1, 4, 32, 32),
            "encoder_hidden_states": torch.randn(1, 12, 32),
            "pooled_projections": torch.randn(1, 64),
            "timestep": torch.tensor([7]),
        }

        def image() -> torch.Tensor:
            seed = torch.Generator().manual_seed(3)
            return pipeline(
                **words, num_inference_steps=2, generator=seed, output_type="pt", height=32, width=32
            ).images

        stock = image()
        for pattern in ("dense", "1:2"):
            applied = dspattn.apply(transformer, pattern, example=latents)
            assert len(applied.changed) == 2 and not applied.left
            applied = dspattn.apply(vae, pattern, example=torch.randn(1, 3, 32, 32))
            assert len(applied.changed) == 2 and not applied.left  # one layer each in encoder and decoder
            change = moved(stock, image())
            assert change < 1e-3 if pattern == "dense" else change > 1e-3
            dspattn.restore(transformer)
            dspattn.restore(vae)
        assert torch.equal(stock, image())


def test_timm() -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed", exc_type=ImportError)
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=192, depth=2, num_classes=7).eval()
    x = torch.randn(2, 3, 192, 192)
    with torch.no_grad():
        stock = model(x)
        dspattn.apply(model, "dense", example=x)
        assert moved(stock, model(x)) < 1e-4
        dspattn.restore(model)
        applied = dspattn.apply(model, "1:2", example=x)
        assert [layer.name for layer in applied.changed] == ["blocks.0.attn", "blocks.1.attn"]
        assert moved(stock, model(x)) > 1e-5
        dspattn.restore(model)
        with dspattn.use("1:2") as switched:
            model(x)
        assert switched.served == 2


def test_sentence_transformers(tmp_path: Any) -> None:
    package = pytest.importorskip(
        "sentence_transformers", reason="sentence-transformers is not installed", exc_type=ImportError
    )
    import tiny_models

    tiny_models.encoder().save_pretrained(tmp_path)
    tiny_models.tokenizer().save_pretrained(tmp_path)
    texts = [tiny_models.text(120), tiny_models.text(90)]
    vectors = {}
    for name in ("dspattn_dense", "dspattn_1_2", "sdpa"):
        model = package.SentenceTransformer(
            str(tmp_path), model_kwargs={"attn_implementation": name}, device="cpu", local_files_only=True
        )
        vectors[name] = model.encode(texts, convert_to_tensor=True, show_progress_bar=False)
    assert moved(vectors["sdpa"], vectors["dspattn_dense"]) < 1e-4
    assert moved(vectors["sdpa"], vectors["dspattn_1_2"]) > 1e-4
    applied = dspattn.apply(model, "1:2", example=(model.tokenize(texts),))
    assert len(applied.changed) == 2


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_pytorch_flash_attention() -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    pytest.importorskip("torch.nn.attention._registry", reason="this torch has no registry of flash attention")
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    from dspattn.integrations import flash

    q, k, v = (torch.randn(1, 2, 150, 16) for _ in range(3))
    stock = attend(q, k, v)
    activate_flash_attention_impl(flash.register("1:2"))
    try:
        assert torch.equal(attend(q, k, v, is_causal=True), dspattn.attention(q, k, v, is_causal=True, pattern="1:2"))
        pruned = dspattn.attention(q, k, v, pattern="1:2")
        assert torch.equal(torch.ops.aten.scaled_dot_product_attention(q, k, v), pruned)
        leaf = q.clone().requires_grad_()
        with pytest.raises(dspattn.DspattnError, match="expected no gradients"):
            attend(leaf, k, v).sum().backward()
    finally:
        restore_flash_attention_impl()
    assert torch.equal(attend(q, k, v), stock)
    assert moved(stock, pruned) > 1e-3
