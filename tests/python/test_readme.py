"""The README's Python example runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def test_python_examples_run():
    examples = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, str(README), "exec"), {})
