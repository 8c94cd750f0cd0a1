"""The documentation names what is there: files, functions, pages; and pages stay short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {".h", ".cpp", ".cu", ".cuh", ".in", ".py", ".sh", ".txt"}


def rows_of(page, columns):
    """The cells of the page's table rows that have so many columns, without the titles."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]
    return [row for row in rows if len(row) == columns and "`" in row[1] + row[-1]]


SHORT = sorted(path.stem for path in (ROOT / "docs").glob("*.md"))  # the logs beside them may be longer


@pytest.mark.parametrize("page", SHORT)
def test_pages_are_short(page):
    assert len((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").split()) <= 1800


@pytest.mark.parametrize("row", rows_of("docs/architecture.md", 4), ids=lambda row: row[0][:30])
def test_the_map_names_what_is_there(row):
    file, names, test = (re.findall(r"`([^`]+)`", cell) for cell in row[1:])
    text = (ROOT / file[0]).read_text(encoding="utf-8")
    assert all(re.search(rf"\b{name}\b", text) for name in names), names
    assert (ROOT / test[0]).is_file(), test
    # What is tested in C++ is built: the CMakeLists.txt of the test's folder names it.
    lists = (ROOT / test[0]).parent / "CMakeLists.txt"
    assert test[0].endswith(".py") or Path(test[0]).name in lists.read_text(encoding="utf-8"), test


@pytest.mark.parametrize(
    "question",
    [
        "which variant",
        "how a key finds its lane",
        "who releases a stage",
        "what a masked tile costs",
        "where a new GPU kernel",
    ],
)
def test_the_map_answers_what_readers_ask(question):
    assert [row for row in rows_of("docs/architecture.md", 4) if question in row[0]]


@pytest.mark.parametrize("row", rows_of("docs/glossary.md", 3), ids=lambda row: row[0][:30])
def test_the_glossary_names_files(row):
    file = row[2].strip("` |")
    assert any((ROOT / base / file).is_file() for base in (".", "src/cuda")), file


def sources(*folders):
    for folder in folders:
        yield from (file for file in sorted((ROOT / folder).rglob("*")) if file.suffix in SOURCES and file.is_file())


CODE = ("apps", "bench", "bindings", "include", "python", "src", "tests", "tools")


def test_comments_name_pages_that_are_there():
    missing = []
    for file in sources(*CODE):
        pages = re.findall(r"\bdocs/[\w/]+\.md", file.read_text(encoding="utf-8"))
        missing += [f"{file.relative_to(ROOT)}: {page}" for page in pages if not (ROOT / page).is_file()]
    assert not missing


def test_no_file_is_long():
    files = [*sources(*CODE, "cmake", "examples", "experiments"), *sorted((ROOT / "docs").rglob("*.md"))]
    lines = {file.relative_to(ROOT): file.read_text(encoding="utf-8").count("\n") for file in files}
    assert not {file: count for file, count in lines.items() if count > 500}
