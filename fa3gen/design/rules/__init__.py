"""Which specs are legal on Hopper, which of those this generator renders, and which of those are not advisable.

A rule is a pure function of facts (integers and strings) that returns a `Violation` or None. It says who objects, the
chip, the generator or mere taste, and what it is about: `@rule(kind=HARDWARE, topic="tile")`. A message shows the
arithmetic and a way out; a docstring names its source by section title, because section numbers move between releases.

Rules judge fields beside each other and against the chip; what a field can be by itself is the model's to say
(`fa3gen.spec.model`). They stand in a module for each subject. `asking` takes the facts from a spec and asks every rule
that they allow, never stopping at the first objection.
"""

from fa3gen.design.rules.asking import answers, check, warnings
from fa3gen.design.rules.registry import RULES, Answer, Kind, Rule, Violation, rule

__all__ = ["RULES", "Answer", "Kind", "Rule", "Violation", "answers", "check", "rule", "warnings"]
