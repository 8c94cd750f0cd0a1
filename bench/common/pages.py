"""Tables between two markers of a page, rewritten from results or checked against them."""

import argparse
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


def markers(name, writer):
    """Two comments that name a table and what writes it."""
    return f"<!-- {name}, written by {writer} -->", f"<!-- end of {name} -->"


class Table(NamedTuple):
    """A table of a page: what `text` makes of a result stands between two comments that name it and the module."""

    page: str  # from the repository's root
    name: str
    result: str  # file in bench/results
    text: object  # function: a result file's content to the text


def run(arguments, module, *tables):
    """Writes the tables into their pages; with --check only says whether they stand there. Exit status."""
    return max(_run_one("--check" in arguments, module, table) for table in tables)


def _run_one(check, module, table):
    path = ROOT / table.page
    text = path.read_text(encoding="utf-8")
    begin, end = markers(table.name, module)
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


def rewritten(text, writer, tables):
    """The page with all its tables made anew: `tables` has a function for every name."""
    for name, make in tables.items():
        begin, end = markers(name, writer)
        text = replaced(text, begin, end, make())
        if text is None:
            raise SystemExit(f"{writer}: expected the markers {begin} and {end}, found none")
    return text


def main(arguments, writer, description, pages):
    """The program `writer`: `pages` has the tables of every page, named from the repository's root. Exit status."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    wrong = 0
    for page, tables in pages.items():
        path = ROOT / page
        before = path.read_text(encoding="utf-8")
        after = rewritten(before, writer, tables)
        if after == before:
            continue
        if options.check:
            print(f"{page}: not what the results say; run {writer}", file=sys.stderr)
            wrong += 1
        else:
            path.write_text(after, encoding="utf-8")
            print(path)
    return 1 if wrong else 0
