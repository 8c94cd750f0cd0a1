"""A table between two markers of a page, rewritten from results or checked against them."""

import re
import sys
from typing import NamedTuple

from bench.common import results
from bench.common.results import ROOT


def replaced(text, begin, end, table):
    """The page with what stands between the markers replaced; None when it has no markers."""
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        return None
    return pattern.sub(lambda _: f"{begin}\n{table}\n{end}", text)


class Table(NamedTuple):
    """A table of a page: what `text` makes of a result stands between two comments that name it and the module."""

    page: str  # from the repository's root
    name: str
    result: str  # file in bench/results
    text: object  # function: a result file's content to the text

    def markers(self, module):
        return f"<!-- {self.name}, written by {module} -->", f"<!-- end of {self.name} -->"


def run(arguments, module, *tables):
    """Writes the tables into their pages; with --check only says whether they stand there. Exit status."""
    return max(_run_one("--check" in arguments, module, table) for table in tables)


def _run_one(check, module, table):
    path = ROOT / table.page
    text = path.read_text(encoding="utf-8")
    begin, end = table.markers(module)
    new = replaced(text, begin, end, table.text(results.read(results.FOLDER / table.result)))
    if new is None:
        print(f"{table.page}: expected the markers {begin} and {end}", file=sys.stderr)
        return 1
    if check:
        if new != text:
            print(f"{table.page}: not what {table.result} says; run python3 -m {module}", file=sys.stderr)
        return int(new != text)
    path.write_text(new, encoding="utf-8")
    return 0
