"""Rooms: every folder of fa3gen/ imports only from itself and the folders below it, and no modules import in a ring."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

import pytest
from rendering import ROOT

# From the bottom to the top. What users import or call by name stands above all rooms.
ABOVE = ("", "__main__", "flash_attn_interface")
ROOMS = (
    *("base", "hardware", "spec", "design", "generate", "compile", "run", "cpu"),
    *("verify", "records", "measure", "inspect", "doctor", "cli"),
)


def sources() -> dict[str, str]:
    """The text of every module in fa3gen/, by dotted name; a package by the name of its folder."""
    files = (ROOT / "fa3gen").rglob("*.py")
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
            for path in files if "data" not in path.relative_to(ROOT).parts[1:2]}  # fmt: skip


def imports(module: str, text: str, known: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """The modules of fa3gen that a module imports, lazily or not, each with its line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "fa3gen")
        elif isinstance(node, ast.ImportFrom):
            assert (
                node.level == 0
            ), f"{module}:{node.lineno} imports relatively; write the whole name, fa3gen.room.module"
            source = node.module or ""
            if source.split(".")[0] == "fa3gen":
                for alias in node.names:
                    whole = f"{source}.{alias.name}"
                    yield node.lineno, whole if whole in known else source


def misplaced(modules: Mapping[str, str]) -> list[str]:
    """What is wrong with the rooms, one sentence each that says what to do."""
    found = []
    for module, text in sorted(modules.items()):
        room = room_of(module)
        if room is None:
            continue
        if room not in ROOMS:
            found.append(
                f"{module} lies in no room: move it into one of {', '.join(ROOMS)}, or name the new room there"
            )
            continue
        for line, imported in imports(module, text, modules):
            other = room_of(imported)
            if other is None:
                found.append(f"{module}:{line} imports {imported}, which stands above all rooms: import from a room")
            elif other in ROOMS and ROOMS.index(other) > ROOMS.index(room):
                found.append(
                    f"{module}:{line} imports {imported}, but {room}/ lies below {other}/: move what both need into "
                    f"{room}/ or a room below it, or hand it over as an argument"
                )
    return found


def room_of(module: str) -> str | None:
    """The room of a dotted name; None for the package itself, `python -m fa3gen`, and the interface of others."""
    _, _, rest = module.partition(".")
    return None if rest in ABOVE else rest.split(".")[0]


def run_time(text: str) -> str:
    """A module without what only the type checker imports."""
    tree = ast.parse(text)
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    return ast.unparse(tree)


def ring(modules: Mapping[str, str]) -> list[str]:
    """Modules that import each other in a ring, types left out; empty when there is no ring."""
    inside = {name: text for name, text in modules.items() if room_of(name) is not None}
    needed = {
        name: {
            imported
            for _, imported in imports(name, run_time(text), modules)
            if imported in inside and imported != name
        }
        for name, text in inside.items()
    }
    try:
        TopologicalSorter(needed).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_room_imports_from_a_room_above() -> None:
    assert misplaced(sources()) == []


def test_no_modules_import_each_other() -> None:
    found = ring(sources())
    assert not found, f"these import each other, so move what they share into one below both: {' <- '.join(found)}"


def test_every_room_is_there_and_says_what_it_owns() -> None:
    modules = sources()
    for room in ROOMS:
        assert ast.get_docstring(ast.parse(modules[f"fa3gen.{room}"])), f"say in fa3gen/{room}/__init__.py what it owns"


@pytest.mark.parametrize(
    ("module", "text", "said"),
    [
        (
            "fa3gen.spec.wrong",
            "from fa3gen.design import rules",
            "fa3gen.spec.wrong:1 imports fa3gen.design.rules, but",
        ),
        (
            "fa3gen.spec.wrong",
            "def f():\n    import fa3gen.cli.tune",
            "fa3gen.spec.wrong:2 imports fa3gen.cli.tune, but",
        ),
        ("fa3gen.base.wrong", "from fa3gen import cli", "fa3gen.base.wrong:1 imports fa3gen.cli, but base/ lies below"),
        ("fa3gen.run.wrong", "from fa3gen import attention", "imports fa3gen, which stands above all rooms"),
        ("fa3gen.attic", "", "fa3gen.attic lies in no room: move it into one of base, hardware"),
        ("fa3gen.attic.box", "", "fa3gen.attic.box lies in no room"),
    ],
)
def test_a_wrong_import_is_named(module: str, text: str, said: str) -> None:
    (wrong,) = misplaced({**sources(), module: text})
    assert said in wrong


def test_a_ring_is_named() -> None:
    modules = {
        "fa3gen.base.a": "def f():\n    from fa3gen.base import b",
        "fa3gen.base.b": "from fa3gen.base.a import f",
    }
    assert set(ring({**sources(), "fa3gen.base": "", **modules})) == set(modules)


def test_the_reference_imports_nothing_of_fa3gen() -> None:
    """What it is to find would be in it, too."""
    text = (ROOT / "fa3gen" / "verify" / "reference.py").read_text(encoding="utf-8")
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {ast.unparse(node).split()[1] for node in imported} == {
        "__future__",
        "collections.abc",
        "math",
        "typing",
        "torch",
    }
