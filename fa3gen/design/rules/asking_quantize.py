"""From the spec of a quantisation to facts: every rule that can be asked about it."""

from __future__ import annotations

from fa3gen.design import quantizing
from fa3gen.design.cta import cta_of
from fa3gen.design.rules import quantizes
from fa3gen.design.rules.registry import Answer
from fa3gen.spec.quantizing import Quantize


def answers(spec: Quantize) -> list[Answer]:
    """All of them; what a thread holds is counted for tiles that are whole."""
    head_dim, rows, threads = spec.problem.head_dim, spec.tile.rows, spec.tile.threads
    found = [
        quantizes.quantize_head_dim.ask(head_dim),
        quantizes.quantize_threads.ask(threads),
        quantizes.quantize_warps.ask(threads),
    ]
    found.append(quantizes.quantize_permuted.ask(spec.problem.permute_keys, spec.problem.transpose))
    if spec.problem.rotate:
        found.append(quantizes.quantize_hadamard.ask(head_dim))
    if spec.problem.transpose:
        found.append(quantizes.quantize_columns_of_tokens.ask(spec.problem.scale))
    if any(answer.refuses for answer in found):
        return found
    found.append(quantizes.quantize_rows.ask(rows, threads, rotate=spec.problem.rotate))
    if spec.problem.transpose and not found[-1].refuses:
        found.append(quantizes.quantize_transposed.ask(rows, threads, quantizing.lanes(spec)))
    if any(answer.refuses for answer in found):
        return found
    found.append(quantizes.quantize_registers.ask(threads, spec.tile.per_sm, quantizing.registers_per_thread(spec)))
    found.append(quantizes.quantize_smem.ask(spec.tile.per_sm, cta_of(spec).smem_bytes))
    return found
