"""What a rule is, what it answers, and the list of all rules."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, get_args

P = ParamSpec("P")


class Kind(StrEnum):
    """Who objects to a spec that breaks a rule.

    - hardware: a limit of the chip, of one of its instructions or copies. The spec is refused.
    - generator: the chip could; no template is written for it. The spec is refused.
    - taste: it is rendered and right, and something else is better. A warning, and `fa3gen tune` tries it all the same.
    """

    HARDWARE = "hardware"
    GENERATOR = "generator"
    TASTE = "taste"


HARDWARE, GENERATOR, TASTE = Kind.HARDWARE, Kind.GENERATOR, Kind.TASTE

# The decision that a rule is about, as the header of a module names it, or a part of the chip. "product" stands for
# the one that the facts name, "structure" for what hardly needs saying.
Topic = Literal[
    "tile",
    "loads",
    "schedule",
    "layouts",
    "S = Q K^T",
    "softmax",
    "P",
    "O = P V",
    "D = A B",
    "kv order",
    "output",
    "q order",
    "order",
    "shared memory",
    "registers",
    "box",
    "product",
    "structure",
]

_FIRST_SENTENCE = re.compile(r"(.+?)\.(?:\s|$)")


class Violation(NamedTuple):
    """A rule that a spec breaks: the dotted path of the field to change, and why."""

    field: str
    message: str


@dataclass(frozen=True)
class Rule(Generic[P]):
    """One rule. Called with facts it judges them; `ask` keeps question and answer together.

    `text` is its documentation in one line: what it says, and the source.
    """

    name: str
    kind: Kind
    topic: Topic
    text: str
    judge: Callable[P, Violation | None]

    def __call__(self, *facts: P.args, **more: P.kwargs) -> Violation | None:
        """What the rule objects to in these facts; None for nothing."""
        return self.judge(*facts, **more)

    def ask(self, *facts: P.args, **more: P.kwargs) -> Answer:
        """Judge the facts, and keep them beside the answer."""
        return Answer(self, facts, more, self.judge(*facts, **more))

    @property
    def statement(self) -> str:
        """The first sentence of its documentation, without the full stop."""
        found = _FIRST_SENTENCE.match(self.text)
        return found.group(1) if found else self.text


@dataclass(frozen=True, eq=False)
class Answer:
    """What a rule was asked about a spec, and what it said: `violation` is None where it has nothing against it."""

    rule: Rule[Any]
    positional: tuple[Any, ...]
    named: dict[str, Any]
    violation: Violation | None

    @property
    def refuses(self) -> bool:
        """Whether there is no kernel for such a spec."""
        return self.violation is not None and self.rule.kind is not TASTE

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """Name and value of each fact, as text."""
        given = inspect.signature(self.rule.judge).bind(*self.positional, **self.named).arguments
        return tuple((name, _shown(value)) for name, value in given.items())

    @property
    def about(self) -> str:
        """The topic; for "product" the one that the facts name."""
        if self.rule.topic != "product":
            return self.rule.topic
        facts = dict(self.facts)
        which = facts.get("product") or facts["field"]
        return {"qk": "S = Q K^T", "pv": "O = P V"}.get(which.lower()[:2], "D = A B")


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        if value and not all(isinstance(each, tuple) for each in value):
            return (" x " if isinstance(value[0], int) else ", ").join(map(str, value))
        return " + ".join(f"{name} {count}" for name, count in value) or "nothing"
    return str(value)


RULES: dict[str, Rule[Any]] = {}  # all of them by name


def rule(*, kind: Kind, topic: Topic) -> Callable[[Callable[P, Violation | None]], Rule[P]]:
    """Make a rule of a function of facts. TypeError without a kind and a topic, ValueError for unknown ones, for a name
    that is taken and for a function without documentation.
    """
    if not isinstance(kind, Kind) or topic not in get_args(Topic):
        raise ValueError(f"a rule has a kind ({', '.join(Kind)}) and a topic ({', '.join(get_args(Topic))})")

    def register(judge: Callable[P, Violation | None]) -> Rule[P]:
        if judge.__name__ in RULES:
            raise ValueError(f"there is a rule {judge.__name__} already")
        if not judge.__doc__:
            raise ValueError(f"rule {judge.__name__} has no docstring; say what it is about, and its source")
        made = Rule(judge.__name__, kind, topic, " ".join(judge.__doc__.split()), judge)
        RULES[made.name] = made
        return made

    return register
