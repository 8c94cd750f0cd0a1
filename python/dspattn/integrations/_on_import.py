"""Registers the attention functions with transformers as soon as someone else imports it, and never imports it itself.

``import dspattn`` stays light, and the names are there whichever of the two packages is imported first.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .. import versions

WATCHED = "transformers.modeling_utils"  # defines AttentionInterface; every model's module imports it


def watch() -> None:
    """Register now when transformers' models are loaded already, otherwise when they are."""
    if WATCHED in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _transformers_version() -> str:
    import transformers

    return str(transformers.__version__)


def _register() -> None:
    """Register, or say why not: an import of transformers must not fail because dspattn is installed."""
    version = _transformers_version()
    if versions.release(version) < versions.OLDEST_TRANSFORMERS:
        wanted = ".".join(map(str, versions.OLDEST_TRANSFORMERS))
        warnings.warn(
            f"dspattn: its names are not registered with transformers {version}; expected {wanted} or later. "
            "dspattn.use and dspattn.attention work with any version.",
            stacklevel=2,
        )
        return
    try:
        from . import huggingface

        huggingface.register()
    except (ImportError, AttributeError, TypeError) as error:
        warnings.warn(
            f"dspattn: its names could not be registered with transformers {version} ({error}); the versions that were "
            f"tested are {versions.TESTED_TRANSFORMERS}. dspattn.use and dspattn.attention work with any version.",
            stacklevel=2,
        )


class _Finder(MetaPathFinder):
    """Lets the other finders find the module and adds one step after its execution. It stays until that was done: a
    module may be looked for without being imported, and an import may fail and be tried again."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != WATCHED:
            return None
        for finder in list(sys.meta_path):
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _ThenRegister(spec.loader)
                return spec
        return None


class _ThenRegister(Loader):
    """The module's own loader, followed by the registration."""

    def __init__(self, inner: Loader) -> None:
        self.inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        _register()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
