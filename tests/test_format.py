"""The committed modules are formatted as black does it, whole files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import black
from rendering import ROOT, STEMS, source

from fa3gen.generate.formatting import top_level_blocks

# What black parsed stays in memory, and Python's collector of garbage looks through it again and again: with it black
# takes twice as long. Processes that black forks have none either.
BLACK = "import gc; gc.disable(); import black; black.patched_main()"
NEIGHBOURS = 2  # blocks before a block with which it is looked at: black looks at one logical line above a comment


def joined(blocks: list[str]) -> str:
    return "\n\n\n".join(blocks) + "\n"


def excerpts(sources: dict[str, str]) -> dict[str, str]:
    """What there is to look at: each block of each text behind each two that it stands behind anywhere, at least once.

    Black formats a statement by itself, and the empty lines above it by what stands before it. So a text is as black
    formats it if all of that is, and most of it is the same in many modules.
    """
    seen: set[tuple[str, ...]] = set()
    found = {}
    for stem, text in sources.items():
        blocks = top_level_blocks(text)
        wanted: set[int] = set()
        for end in range(1, len(blocks) + 1):
            begin = max(0, end - NEIGHBOURS - 1)
            window = (*[""] * (begin == 0), *blocks[begin:end])  # the beginning of a text is a neighbour, too
            if window not in seen:
                seen.add(window)
                wanted.update(range(begin, end))
        found[stem] = joined([blocks[place] for place in sorted(wanted)])
    return found


def unformatted(sources: dict[str, str], folder: Path) -> str:
    """What black says of texts that it would change; nothing when there are none."""
    for stem, text in excerpts(sources).items():
        (folder / f"{stem}.py").write_text(text, encoding="utf-8")
    asked = [sys.executable, "-c", BLACK, "--check", "--workers", "1", "--config", ROOT / "pyproject.toml", folder]
    found = subprocess.run(asked, capture_output=True, text=True)
    return found.stderr if found.returncode else ""


def test_format_is_that_of_black(tmp_path: Path) -> None:
    """`format_module` formats block by block; black on whole files would have nothing left to change."""
    sources = {stem: source(stem) for stem in STEMS}
    assert [stem for stem, text in sources.items() if joined(top_level_blocks(text)) != text or "# fmt:" in text] == []
    assert unformatted(sources, tmp_path) == ""


def test_what_black_would_change_is_found(tmp_path: Path) -> None:
    """A block that it formats in another way, and one that it wants closer to what stands before."""
    a, b = (f"{name} = 1\n\n\ndef f() -> int:\n    return {name}\n" for name in "ab")
    title = '"""Title."""\n\n\n' + a
    sources = {"good": a, "wide": a + "\n\n" + b.replace("= 1", "=  1"), "inside": f"{a}\n\n{title}", "far": title}
    changed = [name for name, text in sources.items() if black.format_str(text, mode=black.Mode()) != text]
    found = unformatted(sources, tmp_path)
    assert changed == ["wide", "far"] == [name for name in sources if f"/{name}.py" in found]
    assert joined(top_level_blocks(a)) == a and excerpts({"good": a, "again": a})["again"] == "\n"
