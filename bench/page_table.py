"""A table between two markers of a page, rewritten from results or checked against them."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def replaced(text, begin, end, table):
    """The page with what stands between the markers replaced; None when it has no markers."""
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        return None
    return pattern.sub(lambda _: f"{begin}\n{table}\n{end}", text)


def run(arguments, script, page, results, begin, end, table):
    """Writes `table(results)` into the page; with --check only says whether it stands there. Exit status."""
    text = page.read_text(encoding="utf-8")
    new = replaced(text, begin, end, table(json.loads(results.read_text(encoding="utf-8"))))
    if new is None:
        print(f"{page.name}: expected the markers {begin} and {end}", file=sys.stderr)
        return 1
    if "--check" in arguments:
        if new != text:
            print(f"{page.name}: not what {results.name} says; run {Path(script).name}", file=sys.stderr)
        return int(new != text)
    page.write_text(new, encoding="utf-8")
    return 0
