"""The instructions that the model has, by family. Importing the package registers all their forms.

A mnemonic that no form matches in full, modifiers and all, is outside the model.
"""

from __future__ import annotations

from fa3gen.cpu.forms import Form, emits, find, forms
from fa3gen.cpu.isa import arithmetic, asynchronous, control, conversion, logic, matrix, memory, warp

__all__ = [
    "Form",
    "arithmetic",
    "asynchronous",
    "control",
    "conversion",
    "emits",
    "find",
    "forms",
    "logic",
    "matrix",
    "memory",
    "warp",
]
