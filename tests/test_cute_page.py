"""docs/cute.md: its examples are run; every name and piece of code in it occurs in them or in a generated module."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from rendering import ROOT, STEMS, constants, source, tree

from fa3gen.cli import COMMANDS
from fa3gen.inspect.report import fragments, swizzles

PAGE = ROOT / "docs" / "cute.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
THE_FILE = {"page.py", "python page.py"}  # that the reader makes
SHOWN = re.compile(r"^( +)print\((.*)\)  # (.*)$")
SHOW = 'def show(number, *values):\n    print("shown", number, *values)\n\n\n'


def program(examples: list[str]) -> tuple[str, list[str]]:
    """The page's file with all examples, each `print` of them numbered, and what the comments say that they print."""
    frame, *more = examples
    body, end = frame.split("\n\n\ncute.compile(")
    lines = "\n".join([body, *(example.rstrip("\n") for example in more)]).splitlines()
    wanted: list[str] = []
    for index, line in enumerate(lines):
        if (found := SHOWN.match(line)) is not None:
            lines[index] = f"{found[1]}show({len(wanted)}, {found[2]})"
            wanted.append(found[3])
        assert "print(" not in lines[index], f"without a comment that says what it prints: {line}"
    first = next(index for index, line in enumerate(lines) if line.startswith("@cute.jit"))
    return "\n".join([*lines[:first], SHOW, *lines[first:], "", "", f"cute.compile({end}"]), wanted


def printed(examples: list[str], folder: Path) -> tuple[list[str], list[str]]:
    """What the examples print, one text for each `print`, and what their comments say; what a loop prints is joined."""
    text, wanted = program(examples)
    path = folder / "page.py"
    path.write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: list[list[str]] = [[] for _ in wanted]
    for number, said in re.findall(r"^shown (\d+) (.*)$", done.stdout, flags=re.MULTILINE):
        found[int(number)].append(said)
    return [", ".join(values) for values in found], wanted


def test_examples_print_what_they_say(tmp_path: Path) -> None:
    found, wanted = printed(EXAMPLES, tmp_path)
    assert len(wanted) > 20
    assert found == wanted


def test_an_example_that_says_something_else_is_noticed(tmp_path: Path) -> None:
    wrong = [EXAMPLES[0].replace("# (4,8):(8,1)", "# (4,8):(1,4)")]
    assert wrong != EXAMPLES[:1]
    assert printed(wrong, tmp_path) == (["(4,8):(8,1)"], ["(4,8):(1,4)"])


def test_the_first_example_runs_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(EXAMPLES[0], encoding="utf-8")
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "(4,8):(8,1)\n"), done.stderr


@cache
def code() -> str:
    """All generated modules and all examples, without line breaks."""
    return " ".join("\n".join([*map(source, STEMS), *EXAMPLES]).split())


def occurs(span: str, text: str) -> bool:
    """Whether the piece of code stands somewhere as it is, and not as a part of longer words.

    A pattern that begins with what stands before it would be tried at every character of all modules.
    """
    found = re.finditer(rf"{re.escape(span)}(?!\w)", text)
    return any(re.match(r"\w", text[place.start() - 1 : place.start()]) is None for place in found)


def unknown(prose: str) -> list[str]:
    """Pieces of code in a text that are in no module and no example; layouts may have spaces or not."""
    layouts = "".join("".join(EXAMPLES).split())
    spans = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose))
    return [
        span
        for span in spans
        if span not in THE_FILE
        and not re.fullmatch(rf"fa3gen ({'|'.join(COMMANDS)}) \w+", span)
        and not occurs(span, code())
        and not (set(span) <= set("0123456789(),:<>S ") and span.replace(" ", "") in layouts)
    ]


def test_every_name_occurs_in_a_module_or_an_example() -> None:
    assert unknown(PROSE) == []
    assert unknown("`tSrQ`, `tSrX`, `(4, 8):(8, 1)` and `(4,8):(7,1)`; `fa3gen reprot k4_2_d64`") == [
        *("tSrX", "(4,8):(7,1)"),
        "fa3gen reprot k4_2_d64",
    ]


def anchors(document: Path) -> set[str]:
    """What links to headings of a document say, as GitHub forms them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", ["docs/cute.md", "docs/ladder.md", "README.md"])
def test_links_lead_somewhere(name: str) -> None:
    """To files that are there, and to headings of documents; README and ladder lead to this page."""
    document = ROOT / name
    links = re.findall(r"\]\(([^)\s#]*)(?:#([^)]*))?\)", document.read_text(encoding="utf-8"))
    for target, anchor in links:
        path = document.parent / target if target else document
        assert path.is_file(), target
        assert not anchor or path.suffix != ".md" or anchor in anchors(path), f"{target}#{anchor}"
    if document != PAGE:
        assert PAGE.resolve() in {(document.parent / target).resolve() for target, _ in links if target}


def test_numbers_of_the_text() -> None:
    """What the page says of modules, and what the report draws, is what it computes by hand."""
    assert constants(tree("k2_d64"))["S_PITCH"] == 72
    assert swizzles.swizzled(5 * 128 + 2 * 16, "128B") == 752
    place = fragments.accumulator(9, 2)
    assert (place.thread, place.register) == (5, 2)
    assert [fragments.accumulator(row, column).thread for row, column in ((1, 2), (1, 3), (1, 10))] == [5, 5, 5]
