"""The Flux benchmark at toy size on the CPU: it prunes where it says so, and nothing else changes."""

import pytest
import torch

import dspattn
from bench.clients import diffusion_models, flux, flux_table
from bench.clients.flux_model import TINY
from bench.common import results


@pytest.mark.parametrize("name", ["plain", "diffusers", "sd3"])
def test_every_attention_call_is_switched(name):
    if name != "plain":
        pytest.importorskip("diffusers", reason="diffusers is not installed", exc_type=ImportError)
        from dspattn.integrations import _flux
    torch.manual_seed(0)
    model = diffusion_models.MODELS[name](TINY, "cpu", torch.float32)
    forward = model.forward
    with torch.no_grad():
        stock = forward()
        with dspattn.use("dense") as switched:
            torch.testing.assert_close(forward(), stock, atol=1e-4, rtol=1e-4)
        assert switched.served == sum(model.attention.values()) and not switched.left
        with dspattn.use("1:2"):
            pruned = forward()
            assert (pruned - stock).abs().max() > 1e-4
        if model.norm_rope is not None:
            calls = []
            model.norm_rope(True)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(_flux, "norm_rope", lambda *a, **n: calls.append(1) or dspattn.norm_rope(*a, **n))
                torch.testing.assert_close(forward(), stock, atol=1e-4, rtol=1e-4)
            assert len(calls) == len(model.blocks)
            model.norm_rope(False)
        flux.change(model, "fused", "eager")
        torch.testing.assert_close(forward(), stock, atol=1e-4, rtol=1e-4)
        with dspattn.use("1:2"):
            torch.testing.assert_close(forward(), pruned, atol=1e-4, rtol=1e-4)
        flux.change(model, "fp8", "eager")
        rounded = (forward() - stock).norm() / stock.norm()
        assert 0.001 < rounded < 0.2, rounded


def test_result_file(tmp_path):
    out = tmp_path / "flux.json"
    flux.main(["--device", "cpu", "--tiny", "--model", "plain", "--out", str(out)])
    stock, compiled = results.read(out)["rows"]
    assert (stock["form"], compiled["form"]) == ("plain", "compiled")
    for row in (stock, compiled):
        check_row(row)
    flux.main(
        [
            "--device",
            "cpu",
            "--tiny",
            "--model",
            "plain",
            "--forms",
            "plain",
            "--patterns",
            "1:2",
            "--kernels",
            "--image-tokens",
            "96",
            "--out",
            str(out),
        ]
    )
    (longer,) = results.read(out)["rows"]
    assert longer["n"] == 128 and longer["form"] == "plain" and set(longer["ratios"]) == {"1:2"}
    names = {name: [kernel for kernel, _, _ in kernels] for name, kernels in longer["kernels"].items()}
    assert any("dspattn" in kernel for kernel in names["1:2"]) and not any("dspattn" in k for k in names["stock"])


def test_result_with_norm_rope(tmp_path):
    pytest.importorskip("diffusers", reason="diffusers is not installed", exc_type=ImportError)
    out = tmp_path / "flux.json"
    flux.main(["--device", "cpu", "--tiny", "--patterns", "1:2", "--norm-rope", "--out", str(out)])
    for row in results.read(out)["rows"]:
        assert set(row["times"]) == {"stock", "1:2", "norm_rope", "1:2, norm_rope"}
        apart = row["relative_difference"]
        assert apart["norm_rope"] < 1e-4 < min(apart["1:2"], apart["1:2, norm_rope"])
    with pytest.raises(SystemExit):
        flux.main(["--device", "cpu", "--tiny", "--model", "plain", "--norm-rope"])


def test_the_tables_of_the_docs_say_what_the_results_say(capsys):
    assert flux_table.main(["--check"]) == 0, capsys.readouterr().err


def check_row(row):
    assert row["n"] == 192 and set(row["ratios"]) == {"1:2", "2:4"} and min(row["ratios"].values()) > 0
    assert 0 < row["relative_difference"]["2:4"] < 1
    assert set(row["attention_times"]) == {"stock", "1:2", "2:4"} and 0 < row["attention_share"] < 1
    assert row["without_attention"] > 1 and min(row["attention_ratios"].values()) > 0
