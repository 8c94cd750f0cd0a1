"""The package as installed: light to import, registered in either order of imports, documented, on the stable ABI."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dspattn
from dspattn import _ops

DOCUMENTED = [
    "dspattn.errors",
    "dspattn.functional",
    "dspattn.weights",
    "dspattn.inspection",
    "dspattn.integrations._account",
    "dspattn.integrations.flash",
    "dspattn.integrations.huggingface",
    "dspattn.integrations.sdpa",
    "dspattn.nn",
    "dspattn.patterns",
    "dspattn.proposing",
    "dspattn.reporting",
    "dspattn.sparse",
    "dspattn.switching",
    "dspattn.versions",
]


def in_a_new_process(code: str) -> dict[str, object]:
    """What the code prints as JSON, run far from the source tree."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_is_light() -> None:
    """Nothing heavy is loaded; bench/cpu/call_overhead.py times it."""
    found = in_a_new_process(
        "import torch, json, sys; import dspattn;"
        "heavy = [m for m in ('transformers', 'sympy', 'torch._dynamo', 'matplotlib') if m in sys.modules];"
        "print(json.dumps({'heavy': heavy}))"
    )
    assert not found["heavy"], found


# What transformers imports besides itself takes most of its time, and none of it is what these tests are about: one
# process has it, and a fork of that runs each case.
IN_FORKS = """
import json, os, sys
import torch, torch._dynamo, torch.distributed.tensor  # and nothing of the two
cases = json.load(sys.stdin)
assert not [name for name in sys.modules if name.partition(".")[0] in ("dspattn", "transformers")]
for code in cases:
    if os.fork() == 0:
        exec(code, {})
        sys.stdout.flush()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0, code
"""

BOTH_NAMES = (
    "from transformers import AttentionInterface;"
    "from transformers.masking_utils import AttentionMaskInterface as masks;"
    "names = [n for n in AttentionInterface._global_mapping if n.startswith('dspattn')];"
    "print(json.dumps({'names': names, 'masks': [n for n in names if n in masks._global_mapping]}))"
)
ORDERS = [f"import json, {pair}; {BOTH_NAMES}" for pair in ("dspattn, transformers", "transformers, dspattn")]
BEFORE = [
    "importlib.util.find_spec('transformers.modeling_utils')",
    "sys.modules['transformers.configuration_utils'] = None; failed()",  # as when an import is interrupted
]
AFTER_SOMETHING = [
    "import contextlib, importlib.util, json, sys\nimport dspattn\n"
    "def failed():\n"
    "    with contextlib.suppress(ImportError):\n"
    "        import transformers.modeling_utils\n"
    "    del sys.modules['transformers.configuration_utils']\n"
    f"{before}\n"
    "import transformers.modeling_utils\n"
    "left = [f for f in sys.meta_path if type(f).__module__.startswith('dspattn')]\n"
    "names = list(transformers.modeling_utils.AttentionInterface._global_mapping)\n"
    "print(json.dumps({'names': names, 'left': len(left)}))"
    for before in BEFORE
]


@pytest.fixture(scope="module")
def registered() -> dict[str, dict[str, Any]]:
    """What each of ORDERS and AFTER_SOMETHING prints, by itself."""
    pytest.importorskip("transformers", minversion="5.0")
    cases = ORDERS + AFTER_SOMETHING
    command = [sys.executable, "-c", IN_FORKS]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("code", ORDERS, ids=["dspattn-transformers", "transformers-dspattn"])
def test_names_are_registered_in_either_order(registered: dict[str, dict[str, Any]], code: str) -> None:
    found = registered[code]
    wanted = {"dspattn_dense", "dspattn_2_4", "dspattn_1_2", "dspattn_2_4_consecutive", "dspattn_1_2_consecutive"}
    assert wanted <= set(found["names"]) and found["names"] == found["masks"]


@pytest.mark.parametrize("code", AFTER_SOMETHING, ids=["found", "interrupted"])
def test_names_are_registered_whatever_came_before_the_import(registered: dict[str, dict[str, Any]], code: str) -> None:
    found = registered[code]
    assert "dspattn_2_4" in found["names"] and found["left"] == 0


def test_typed() -> None:
    assert (Path(dspattn.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch}, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0 and result.attempted > 0


def test_every_public_name_has_an_example() -> None:
    for name in dspattn.__all__:
        thing = getattr(dspattn, name)
        if not inspect.ismodule(thing):
            assert thing.__doc__ and ">>>" in thing.__doc__, f"{name} has no example"


def test_missing_library_is_explained() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import dspattn"], capture_output=True, text=True, cwd="/", check=False,
        env={**os.environ, _ops.LIBRARY_VARIABLE: "/nowhere/dspattn_torch.so"},
    )  # fmt: skip
    assert done.returncode != 0 and "/nowhere/dspattn_torch.so" in done.stderr and "pip install ." in done.stderr


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm (binutils)")
def test_only_the_stable_abi_is_used() -> None:
    listing = subprocess.run(["nm", "-D", _ops._library_file()], capture_output=True, text=True, check=True).stdout
    undefined = re.findall(r" U (\S+)", listing)
    of_torch = [name for name in undefined if "torch" in name]
    assert any(name.startswith("torch_") for name in of_torch)
    foreign = [name for name in of_torch if not re.match(r"(aoti_)?torch_\w+$", name)]
    foreign += [name for name in undefined if re.match(r"_Z\w*(2at|3c10|5torch)", name) or name.startswith("Py")]
    assert not foreign, foreign
