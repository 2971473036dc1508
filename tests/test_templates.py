"""Templates: no dead arm or line, nothing decided or computed in Jinja, readable nesting."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import jinja2
import pytest
from jinja2 import nodes
from rendering import CHECKOUT, plans

from fa3gen.generate.render import LineStatements

TEMPLATES = CHECKOUT.templates_dir
NAMES = sorted(path.relative_to(TEMPLATES).as_posix() for path in TEMPLATES.rglob("*") if path.is_file())
STATEMENT = re.compile(r"[ \t]*#%[ \t]*(\w+)")


def environment(loader: jinja2.BaseLoader) -> jinja2.Environment:
    """As `fa3gen.generate.render` sets it up."""
    return jinja2.Environment(
        loader=loader,
        extensions=[LineStatements],
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )


def text(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def parsed(name: str) -> nodes.Template:
    return environment(jinja2.FileSystemLoader(TEMPLATES)).parse(text(name), name)


def test_all_templates_are_named_alike() -> None:
    assert NAMES != []
    assert [name for name in NAMES if not name.endswith(".py.jinja")] == []


# Dead arms and lines


def instrumented(name: str, source: str) -> tuple[str, dict[str, str]]:
    """The template with a call of `taken` in every arm, also in the `else` that an `if` lacks; and name -> arm."""
    lines: list[str] = []
    arms: dict[str, str] = {}
    open_ifs: list[tuple[int, str, bool]] = []

    def mark(number: int, what: str) -> None:
        arms[f"{name}:{number}:{what}"] = what
        lines.append(f'{{{{ taken("{name}:{number}:{what}") }}}}')

    for number, line in enumerate(source.splitlines(), 1):
        statement = STATEMENT.match(line)
        word = statement[1] if statement else ""
        if word == "endif":
            start, _, has_else = open_ifs.pop()
            if not has_else:
                lines.append("#% else")
                mark(start, "no")
        lines.append(line)
        if word == "if":
            open_ifs.append((number, line, False))
        elif word == "else":
            open_ifs[-1] = (*open_ifs[-1][:2], True)
        if word in ("if", "elif", "else"):
            mark(number, "yes")
    return "\n".join(lines) + "\n", arms


def test_every_arm_is_taken_by_a_committed_module() -> None:
    """Both ways of every `if`: an arm that no module takes is untested code, a condition that never fails is noise."""
    sources = {name: instrumented(name, text(name)) for name in NAMES}
    arms = {arm for _, found in sources.values() for arm in found}
    taken: set[str] = set()

    def take(arm: str) -> str:
        taken.add(arm)
        return ""

    jinja = environment(jinja2.DictLoader({name: source for name, (source, _) in sources.items()}))
    for plan in plans().values():
        jinja.get_template(plan.spine).render(plan=plan, taken=take)
    assert len(arms) > 100
    assert taken <= arms
    assert not arms - taken, "\n".join(sorted(arms - taken))


@cache
def unformatted_lines() -> frozenset[str]:
    """Every line of every module, as the templates print it, before black."""
    jinja = environment(jinja2.FileSystemLoader(TEMPLATES))
    modules = [jinja.get_template(plan.spine).render(plan=plan) for plan in plans().values()]
    return frozenset(line for module in modules for line in module.splitlines())


@pytest.mark.parametrize("name", NAMES)
def test_every_static_line_occurs_in_a_committed_module(name: str) -> None:
    static = [line for line in text(name).splitlines() if not STATEMENT.match(line) and "{{" not in line]
    assert [line for line in static if line not in unformatted_lines()] == []


def test_every_template_is_used() -> None:
    used: set[str] = set()

    class Noting(jinja2.FileSystemLoader):
        def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, Callable[[], bool]]:
            used.add(template)
            return super().get_source(environment, template)

    jinja = environment(Noting(TEMPLATES))
    for plan in plans().values():
        jinja.get_template(plan.spine).render(plan=plan)
    assert sorted(used) == NAMES


# Short enough to be read

MOST_LINES = 150  # of a section
MOST_LINES_IN_ALL = 10740


def test_sections_are_short() -> None:
    lengths = {name: len(text(name).splitlines()) for name in NAMES}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}
    assert sum(lengths.values()) < MOST_LINES_IN_ALL


# No logic in Jinja

CONTAINERS = (nodes.Template, nodes.Output, nodes.TemplateData, nodes.Include, nodes.If, nodes.For)
CONDITIONS = (nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not)
VALUES = (nodes.Name, nodes.Getattr, nodes.Const, nodes.Filter)


def descendants(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for child in node.iter_child_nodes():
        yield from descendants(child)


def judge(node: nodes.Node) -> str | None:
    """What is wrong with one node of a template, or None."""
    if not isinstance(node, (*CONTAINERS, *CONDITIONS, *VALUES)):
        return f"{type(node).__name__} is computation"
    if isinstance(node, nodes.Filter) and node.name != "join":
        return f"filter {node.name}"
    if isinstance(node, nodes.Compare) and not all(isinstance(operand.expr, nodes.Const) for operand in node.ops):
        return "a comparison of two variables"
    if isinstance(node, nodes.Operand) and node.op not in ("eq", "ne"):
        return f"comparison {node.op}"
    if isinstance(node, nodes.Name) and node.name not in ("plan", "line", "layout"):
        return f"variable {node.name}"
    return None


@pytest.mark.parametrize("name", NAMES)
def test_templates_compute_nothing(name: str) -> None:
    """Names, attributes, comparisons with constants, and/or/not, include, if, for and join; all else is the plan's."""
    found = [(node.lineno, problem) for node in descendants(parsed(name)) if (problem := judge(node))]
    assert found == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ plan.a + 1 }}", "Add is computation"),
        ("{{ plan.a ~ 'x' }}", "Concat is computation"),
        ("{{ plan.f(1) }}", "Call is computation"),
        ("{% set x = plan.a %}", "Assign is computation"),
        ("{% macro m() %}{% endmacro %}", "Macro is computation"),
        ("{% if plan.a > 1 %}{% endif %}", "comparison gt"),
        ("{% if plan.a == plan.b %}{% endif %}", "a comparison of two variables"),
        ("{{ plan.a | upper }}", "filter upper"),
        ("{{ spec.a }}", "variable spec"),
    ],
)
def test_computation_in_a_template_is_seen(source: str, problem: str) -> None:
    template = environment(jinja2.DictLoader({})).parse(source)
    assert problem in [judge(node) for node in descendants(template)]


def if_depth(node: nodes.Node) -> int:
    """How deep `if` stands in `if`; an `elif` is as deep as its `if`."""
    if not isinstance(node, nodes.If):
        return max((if_depth(child) for child in node.iter_child_nodes()), default=0)
    arms = [*node.body, *node.else_, *(child for arm in node.elif_ for child in arm.body)]
    return 1 + max((if_depth(child) for child in arms), default=0)


def test_ifs_nest_two_deep_at_most() -> None:
    assert {name: depth for name in NAMES if (depth := if_depth(parsed(name))) > 2} == {}


def test_depth_of_ifs_is_seen() -> None:
    nested = (
        "{% if plan.a %}{% if plan.b %}{% for x in y %}{% if plan.c %}{% endif %}{% endfor %}{% endif %}{% endif %}"
    )
    chained = "{% if plan.a %}{% elif plan.b %}{% elif plan.c %}{% else %}{% endif %}"
    jinja = environment(jinja2.DictLoader({}))
    assert (if_depth(jinja.parse(nested)), if_depth(jinja.parse(chained))) == (3, 1)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("sections/")])
def test_spines_are_includes_only(name: str) -> None:
    assert [line for line in text(name).splitlines() if not re.fullmatch(r"#% include \S+", line)] == []


# Readable as Python


def python_of(source: str, arm: int) -> str:
    """A template as Python: of each `if` the first (`arm` 0) or the last (-1) arm, a name for each expression."""
    lines: list[str] = []
    stack: list[list[list[str]]] = [[lines]]
    for line in re.sub(r"\{\{.*?\}\}", "x", source).splitlines():
        statement = STATEMENT.match(line)
        word = statement[1] if statement else ""
        if word == "if":
            stack.append([[]])
        elif word in ("elif", "else"):
            stack[-1].append([])
        elif word == "endif":
            arms = stack.pop()
            stack[-1][-1].extend(arms[arm])
        elif not word:
            stack[-1][-1].append(line)
    assert len(stack) == 1
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("sections/")])
@pytest.mark.parametrize("arm", [0, -1], ids=["first", "last"])
def test_a_section_reads_as_python(name: str, arm: int) -> None:
    """Top-level code, or a part of a function's body."""
    source = python_of(text(name), arm)
    within = "if True:\n" * source.startswith(" ")
    ast.parse(within + source, name)


def test_statements_stand_at_the_left_edge() -> None:
    """A statement is no code: at the left edge it cannot be taken for a line of the block around it."""
    pattern = re.compile(r"[ \t]+#%|\{%|.*\S[ \t]*#%|#%\S")
    found = [(name, line) for name in NAMES for line in text(name).splitlines() if pattern.match(line)]
    assert found == []


def test_templates_end_in_one_newline_and_have_no_tabs() -> None:
    untidy = [
        name
        for name in map(Path, NAMES)
        if not text(name.as_posix()).endswith("\n") or re.search(r"\t|[ \t]\n", text(name.as_posix()))
    ]
    assert untidy == []
