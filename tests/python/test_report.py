"""The HTML page: what it holds, and how it behaves in a browser.

The browser tests run headless Chromium on the page with a script added that clicks through it; they skip where no
Chromium is installed.
"""

from __future__ import annotations

import base64
import html
import importlib
import json
import pkgutil
import re
import shutil
import subprocess
import types
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dspattn

pytest.importorskip("transformers")
import transformers

import tiny_models
from dspattn import inspection

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)} is installed")
TOKENS = 140

# Clicks every kind of control, as a reader would, and leaves what the page then says in an attribute of its body.
CLICKS = """
<script>
(async () => {
  const failures = [];
  addEventListener("error", (event) => failures.push(event.message));
  addEventListener("unhandledrejection", (event) => failures.push(String(event.reason)));
  const settle = async () => {
    do { await new Promise((done) => setTimeout(done, 5)); } while (document.body.dataset.ready !== "yes");
  };
  const map = () => [...document.getElementById("canvas").toDataURL()].reduce(
    (sum, letter) => (sum * 31 + letter.charCodeAt(0)) % 1000003, 7);
  const seen = () => ({
    chosen: document.getElementById("chosen").textContent,
    tiles: [...document.querySelectorAll("#tiles b")].map((tile) => tile.textContent),
    pressed: [...document.querySelectorAll("[aria-pressed=true]")].length,
    bars: document.querySelectorAll("#histogram rect").length,
    lost: document.querySelectorAll("#text span.lost").length,
    map: map(),
    top: document.getElementById("map-top").textContent,
  });
  const steps = {};
  await settle();
  steps.first = seen();
  for (const button of document.querySelectorAll("#grid button")) {
    button.click();
    await settle();
    steps["head " + button.dataset.layer + "." + button.dataset.head] = seen();
  }
  for (const name of ["pattern", "grouping", "view", "measure"]) {
    for (const button of document.querySelectorAll("#" + name + " button")) {
      button.click();
      await settle();
      steps[name + " " + button.value] = seen();
    }
  }
  document.getElementById("theme").click();
  await settle();
  steps.theme = seen();
  document.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowUp" }));
  await settle();
  steps.key = seen();
  document.querySelectorAll("#text span")[2].click();
  await settle();
  steps.token = seen();
  const box = document.getElementById("canvas").getBoundingClientRect();
  document.getElementById("canvas").dispatchEvent(
    new MouseEvent("mousemove", { clientX: box.left + 1, clientY: box.top + 1 }));
  steps.under = document.getElementById("under").textContent;
  steps.hash = location.hash;
  steps.failures = failures;
  document.body.dataset.steps = JSON.stringify(steps);
})();
</script>
"""


def browse(page: Path) -> tuple[str, list[str]]:
    """The page's document after its scripts ran, and what it wrote to the console."""
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += ["--virtual-time-budget=60000", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "folder" / "report.html"
    model, tokenizer = tiny_models.decoder(), tiny_models.tokenizer()
    found = dspattn.report(
        model, tokenizer, tiny_models.text(200), path, patterns=["2:4", "1:2"], max_tokens=TOKENS, progress=False
    )
    assert found == path
    return path


def content(path: Path) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert match
    return json.loads(match[1])


def unpacked(text: str, dtype: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=dtype)


def test_the_page_holds_what_was_computed(page: Path) -> None:
    data = content(page)
    ids = torch.tensor(tiny_models.tokenizer()(tiny_models.text(TOKENS))["input_ids"])
    layers = inspection.capture(tiny_models.decoder(), ids)
    assert (data["layers"], data["heads"], len(data["tokens"])) == (2, 4, TOKENS)
    assert "</script>" in " ".join(data["tokens"])  # a token that would end the script element was carried through
    for index, layer in enumerate(layers):
        dense = torch.from_numpy(unpacked(data["dense"][index], "u1").copy()).view(4, TOKENS, TOKENS).double() / 255
        torch.testing.assert_close(dense**2, layer.weights("dense", "interleaved")[0].double(), rtol=0, atol=0.005)
        for pattern in ("2:4", "1:2"):
            for grouping in ("interleaved", "consecutive"):
                entry = data["results"][f"{pattern} {grouping}"]
                found = inspection.compare(layer, pattern, grouping)  # type: ignore[arg-type]
                bits = np.unpackbits(unpacked(entry["bits"][index], "u1"))[: found.kept.numel()]
                assert np.array_equal(bits.astype(bool), found.kept.flatten().numpy())
                rows = unpacked(entry["rows"][index], "<u2") / 65535
                np.testing.assert_allclose(rows, found.kept_weight.flatten().numpy(), atol=2e-5)
                np.testing.assert_allclose(entry["error"][index], found.output_error.numpy(), atol=1e-5)
                np.testing.assert_allclose(entry["kept"][index], found.kept_weight.mean(-1).numpy(), atol=1e-5)


def test_the_page_asks_for_nothing_outside_itself(page: Path) -> None:
    text = page.read_text()
    assert not re.findall(r"https?://", text)
    assert all(value.startswith("data:") for value in re.findall(r'(?:src|href)="([^"]*)"', text))
    assert "@import" not in text


def test_arguments_that_cannot_be_served_raise(tmp_path: Path) -> None:
    model, tokenizer = tiny_models.encoder(), tiny_models.tokenizer()
    vit = transformers.ViTModel(transformers.ViTConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=2))
    t5 = small_t5()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"patterns": []}, "patterns: expected at least one"),
        ({"patterns": ["5:4"]}, "pattern: expected"),
        ({"patterns": iter(["2:4"])}, "patterns: expected at least one in a list, got <list_iterator"),
        ({"path": b"page.html"}, "path: expected the name of a file, got b'page.html'"),
        ({"path": "page\0.html"}, "path: expected the name of a file"),
        ({"groupings": ["sideways"]}, "grouping: expected"),
        ({"max_tokens": 1}, "max_tokens: expected at least 2, got 1"),
        ({"text": ""}, "text: expected at least 2 tokens, got 0"),
        ({"text": 7}, "text: expected a string, got int"),
        ({"tokenizer": "bert"}, "tokenizer: expected the model's tokenizer, got str"),
        ({"model": torch.nn.Linear(2, 2)}, "model: expected a transformers model, got Linear"),
        ({"model": vit}, "model: expected one that reads a text .* got ViTModel, which reads pixel_values"),
        ({"model": t5}, r"model: .* got T5Model, an encoder-decoder model; model.get_encoder\(\) can be shown"),
    ]
    for change, reason in cases:
        arguments = {"model": model, "tokenizer": tokenizer, "text": tiny_models.text(30), "progress": False}
        with pytest.raises(dspattn.DspattnError, match=reason):
            dspattn.report(**(arguments | {"path": tmp_path / "page.html"} | change))
    assert not list(tmp_path.iterdir())


def test_a_report_that_cannot_be_written_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny_models.decoder(), tiny_models.tokenizer()

    def write(path: Path) -> None:
        dspattn.report(model, tokenizer, tiny_models.text(20), path, patterns=["2:4"], max_tokens=8, progress=False)

    (tmp_path / "file").write_text("what was there")
    for path in (tmp_path, tmp_path / "file" / "report.html"):
        with pytest.raises(dspattn.DspattnError, match="path: expected a file that can be written, got "):
            write(path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "what was there"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "file").chmod(0o600)
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and "<html" in (tmp_path / "file").read_text()
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_what_is_named_twice_is_shown_once(tmp_path: Path) -> None:
    pages = []
    for patterns, groupings in ((["2:4"], ["consecutive"]), (["2:4", "2:4"], ["consecutive", "consecutive"])):
        pages.append(
            dspattn.report(
                tiny_models.decoder(), tiny_models.tokenizer(), tiny_models.text(20), tmp_path / f"{len(pages)}.html",
                patterns=patterns, groupings=groupings, max_tokens=8, progress=False,
            ).read_text()
        )  # fmt: skip
    assert pages[0] == pages[1]


def test_the_function_shares_its_name_with_no_module() -> None:
    """A module of that name would take the function's place as soon as it is imported."""
    names = {module.name for module in pkgutil.iter_modules(dspattn.__path__)}
    assert not names & {name for name in dspattn.__all__ if not isinstance(getattr(dspattn, name), types.ModuleType)}
    importlib.import_module("dspattn.make_report")
    assert isinstance(dspattn.report, types.FunctionType)


def small_t5() -> Any:
    torch.manual_seed(0)
    return transformers.T5Model(
        transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=32)
    ).eval()


def test_an_encoder_with_a_bias_by_relative_position(tmp_path: Path) -> None:
    tiny_models.skip_if_not_looked_up("T5")
    encoder, tokenizer = small_t5().get_encoder(), tiny_models.tokenizer()
    ids = torch.tensor(tokenizer(tiny_models.text(100))["input_ids"])
    encoder.set_attn_implementation("eager")
    with torch.inference_mode():
        eager = encoder(ids.unsqueeze(0), output_attentions=True).attentions
    layers = inspection.capture(encoder, ids)
    for layer, wanted in zip(layers, eager, strict=True):
        torch.testing.assert_close(layer.weights("dense", "interleaved"), wanted, atol=1e-5, rtol=1e-4)
    page = dspattn.report(encoder, tokenizer, tiny_models.text(100), tmp_path / "t5.html", progress=False)
    assert content(page)["layers"] == 2


def test_a_text_that_was_cut_says_so(page: Path, tmp_path: Path) -> None:
    assert f"Cut: the first {TOKENS} of 200 tokens are shown" in content(page)["made"]
    whole = dspattn.report(
        tiny_models.encoder(1), tiny_models.tokenizer(), tiny_models.text(5), tmp_path / "a.html", progress=False
    )
    assert "Cut" not in content(whole)["made"] and "…" not in content(whole)["made"]


@needs_browser
def test_every_control_works_in_a_browser(page: Path, tmp_path: Path) -> None:
    clicked = tmp_path / "clicked.html"
    clicked.write_text(page.read_text().replace("</body>", CLICKS + "</body>"))
    document, console = browse(clicked)
    assert console == []
    match = re.search(r'<body[^>]* data-steps="([^"]*)"', document)
    assert match, "the clicking script did not come to its end"
    steps = json.loads(html.unescape(match[1]))
    assert steps["failures"] == []
    data = content(page)
    result = data["results"]["2:4 interleaved"]
    maps = set()
    for layer in range(2):
        for head in range(4):
            step = steps[f"head {layer}.{head}"]
            assert step["chosen"] == f"Layer {layer}, head {head}, 2:4 interleaved"
            assert step["tiles"][0] == f"{100 * result['kept'][layer][head]:.2f} %"
            assert step["tiles"][2] == f"{100 * result['error'][layer][head]:.2f} %"
            assert (step["pressed"], step["bars"]) == (5, 20)
            maps.add(step["map"])
    assert len(maps) == 8, "every head draws its own map"
    assert steps["pattern 1:2"]["chosen"].endswith("1:2 interleaved")
    assert steps["grouping consecutive"]["chosen"].endswith("1:2 consecutive")
    assert len({steps[f"view {view}"]["map"] for view in ("dense", "pruned", "lost")}) == 3
    assert steps["theme"]["map"] != steps["measure kept"]["map"]
    assert steps["key"]["chosen"].startswith("Layer 0, head 3")
    assert max(step["lost"] for name, step in steps.items() if name.startswith("head ")) > 10
    assert steps["token"]["lost"] == 1  # query 2 of a causal model sees keys 0, 1 and 2: one of the first pair is lost
    assert re.fullmatch(r"0\.\d+ and more", steps["first"]["top"])
    assert "query 0" in steps["under"]
    assert "query=2" in steps["hash"]


@needs_browser
def test_the_address_chooses_the_view(page: Path) -> None:
    assert BROWSER is not None
    link = page.as_uri() + "#layer=1&head=2&pattern=1:2&grouping=consecutive&view=dense"
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=20000",
        "--dump-dom",
        link,
    ]
    document = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "Layer 1, head 2, 1:2 consecutive" in document


@needs_browser
def test_the_browser_check_sees_a_console_error(tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<!doctype html><link rel=icon href='data:,'><script>console.error('broken'); nothing();</script>")
    _, console = browse(bad)
    assert len(console) == 2
