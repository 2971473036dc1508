"""The registry of instruction forms: an allow list of mnemonics with all their modifiers.

Every form is a regular expression over the whole mnemonic and a function that writes the Python for it. A mnemonic
that no form matches in full is outside the model, whatever its opcode.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fa3gen.cpu.findings import OutsideModel
from fa3gen.cpu.ptx import Instruction

if TYPE_CHECKING:
    from fa3gen.cpu.emitter import Emitter

Emit = Callable[["Emitter", Instruction, re.Match[str]], None]


@dataclass(frozen=True)
class Form:
    """One family of mnemonics.

    `destinations` counts the leading operands that are written; `accumulates` says that they are read as well.
    A `blocking` instruction may have to wait; one that is `observable` can be seen by other warps, so that a
    preemptive schedule switches warps after it. `only` says in words what there is
    of an opcode, for those who ask for something else.
    """

    pattern: re.Pattern[str]
    emit: Emit
    destinations: Callable[[Instruction], int]
    accumulates: bool
    blocking: bool
    observable: bool
    only: str

    @property
    def name(self) -> str:
        """The pattern as text, which identifies the form."""
        return self.pattern.pattern


_FORMS: dict[str, list[Form]] = {}  # by opcode
_FOUND: dict[str, tuple[Form, re.Match[str]]] = {}  # by mnemonic: kernels have each of theirs many times


def emits(
    pattern: str,
    *,
    destinations: int | Callable[[Instruction], int] = 1,
    accumulates: bool = False,
    blocking: bool = False,
    observable: bool = False,
    only: str = "",
) -> Callable[[Emit], Emit]:
    """Register the decorated function for the mnemonics that `pattern` matches in full.

    `pattern` starts with the opcode in plain letters, or with alternatives of opcodes as `(?P<op>add|sub)`.
    """
    count = destinations if callable(destinations) else lambda instruction: destinations

    def register(emit: Emit) -> Emit:
        form = Form(re.compile(pattern), emit, count, accumulates, blocking, observable, only)
        for opcode in _opcodes(pattern):
            _FORMS.setdefault(opcode, []).append(form)
        _FOUND.clear()
        return emit

    return register


def _opcodes(pattern: str) -> list[str]:
    alternatives = re.match(r"\(\?P<op>([a-z0-9|]+)\)", pattern)
    if alternatives:
        return alternatives.group(1).split("|")
    plain = re.match(r"[a-z0-9]+", pattern)
    assert plain is not None, pattern
    return [plain.group()]


def find(instruction: Instruction, kernel: str) -> tuple[Form, re.Match[str]]:
    """The form of an instruction. Raises OutsideModel."""
    mnemonic = instruction.mnemonic
    found = _FOUND.get(mnemonic)
    if found is not None:
        return found
    for form in _FORMS.get(instruction.opcode, ()):
        match = form.pattern.fullmatch(mnemonic)
        if match:
            _FOUND[mnemonic] = form, match
            return form, match
    only = "".join(f"; it has only {form.only}" for form in _FORMS.get(instruction.opcode, ()) if form.only)
    raise OutsideModel(
        f"PTX line {instruction.line} of {kernel}: {instruction.mnemonic} is not an instruction of the CPU model "
        f"(modifiers count){only}; add a form to fa3gen/cpu/isa and its unit test, or run this kernel on a GPU"
    )


def forms() -> list[Form]:
    """All registered forms, each once."""
    return list({id(form): form for group in _FORMS.values() for form in group}.values())
