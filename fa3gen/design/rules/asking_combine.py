"""From the spec of a merge to facts: every rule that can be asked about it."""

from __future__ import annotations

from fa3gen.design import combining
from fa3gen.design.rules import combines
from fa3gen.design.rules.registry import Answer
from fa3gen.spec.combining import Combine


def answers(spec: Combine) -> list[Answer]:
    """All of them; shares and registers are counted for threads that a CTA can have."""
    threads, shares = spec.cta.threads, spec.parts.shares
    found = [combines.combine_threads.ask(threads), combines.combine_power.ask(threads)]
    if any(answer.refuses for answer in found):
        return found
    found.append(combines.combine_shares.ask(shares, threads))
    found.append(combines.combine_registers.ask(threads, spec.cta.per_sm, combining.registers_per_thread(spec)))
    if not any(answer.refuses for answer in found):
        found.append(combines.combine_lines.ask(shares, threads))
    return found
