"""`fa3gen explain`: what a spec decides, why that is legal, what it costs, and what bounds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fa3gen.cli import completion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa3gen.design.family import Shape
    from fa3gen.design.workspace import Workspace
    from fa3gen.inspect.explanation import Explanation
    from fa3gen.spec.model import Forward
    from fa3gen.spec.specfile import Variant

TOKENS = 16384  # batch x sequence length, where no batch is given


def explain(
    specs: Annotated[
        list[str],
        typer.Argument(
            metavar="SPEC", autocompletion=completion.specs, help="Spec files, spec stems or generated stems."
        ),
    ],
    seq: Annotated[
        str, typer.Option(metavar="LENGTHS", help="Sequence lengths, 512,4096; 1x4096: one query, 4096 keys.")
    ] = "512,1024,4096,16384",
    batch: Annotated[int | None, typer.Option(min=1, help="Batch entries (default: 16,384 tokens in all).")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads (default: 2048 / head dim).")] = None,
    heads_kv: Annotated[
        int | None, typer.Option(min=1, help="Heads of k and v (default: as many as of q, or as the tile packs).")
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(metavar="LEFT,RIGHT", help="Keys that queries see, where calls say; -1: all (default: 512,0)."),
    ] = None,
    num_splits: Annotated[
        int | None,
        typer.Option(min=2, help="Parts of the keys that a call asks for (default: as many as the module chooses)."),
    ] = None,
    chip: Annotated[
        list[str] | None, typer.Option(autocompletion=completion.chips, help="h100 or h200; both if not given.")
    ] = None,
    rules: Annotated[bool, typer.Option("--rules", help="Show every rule, who says it, its source and facts.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Explain specs: decisions and why they are legal, warps, memory, barriers, steps, counts, and what bounds them.

    Nothing is compiled or run. Registers per thread are those of the evidence where it speaks of the present file, else
    those that the plan expects. Ceilings are a roofline at the boost clock: no kernel reaches them, and under the power
    limit the clock is lower.
    """
    from dataclasses import replace

    from fa3gen.design.masks import given_with_calls
    from fa3gen.design.workspace import Workspace
    from fa3gen.hardware import chips
    from fa3gen.inspect import explanation
    from fa3gen.spec.model import Forward

    workspace = Workspace.find()
    lengths, wanted = _lengths(seq), chips.select(chip)
    variants = workspace.select(specs)
    if window is not None:
        _require_given_windows(variants)
    found: list[Explanation] = []
    for variant in variants:
        spec = variant.spec
        shapes = _shapes(spec, lengths, batch, heads, heads_kv) if isinstance(spec, Forward) else []
        if isinstance(spec, Forward) and given_with_calls(spec.mask):
            shapes = [replace(shape, window=_window(window)) for shape in shapes]
        found.append(
            explanation.explain(variant, shapes, wanted, compiled_registers(workspace, variant), num_splits or 0)
        )
    if as_json:
        import json

        from fa3gen.inspect.explanation.document import document

        typer.echo(json.dumps(document(found), indent=2))
        return
    from rich.console import Console

    from fa3gen.inspect.explanation import text

    console = Console(highlight=False)
    for index, explained in enumerate(found):
        if index:
            console.rule(style="dim")
        text.show(explained, console, rules=rules)


def _lengths(seq: str) -> tuple[tuple[int, int], ...]:
    from fa3gen.cli.tune import parse_lengths

    return parse_lengths(seq)


def _require_given_windows(variants: Sequence[Variant]) -> None:
    """Raise UserError where none of these modules takes a window from calls."""
    from fa3gen.base.errors import UserError
    from fa3gen.design.masks import given_with_calls
    from fa3gen.spec.specfile import attention_among

    if not any(given_with_calls(variant.spec.mask) for variant in attention_among(variants)):
        names = ", ".join(variant.stem for variant in variants)
        raise UserError(
            f"--window is the window of a call, and {names} {'takes' if len(variants) == 1 else 'take'} none from "
            "calls; leave it out, or name modules of any window (`fa3gen list --mask any_window`)"
        )


def _window(text: str | None) -> tuple[int, int]:
    """The window of a call that gives one. Raises UserError."""
    from fa3gen.base.errors import UserError
    from fa3gen.design.masks import USUAL_WINDOW
    from fa3gen.spec.model import WINDOW_MAX

    if text is None:
        return USUAL_WINDOW
    try:
        left, right = (int(keys) for keys in text.split(","))
    except ValueError:
        left = right = -2
    if not all(-1 <= keys <= WINDOW_MAX for keys in (left, right)):
        raise UserError(f"--window is {text}; it needs to be LEFT,RIGHT, each from 0 to {WINDOW_MAX}, or -1 for all")
    return left, right


def _shapes(
    spec: Forward, lengths: Sequence[tuple[int, int]], batch: int | None, heads: int | None, heads_kv: int | None
) -> list[Shape]:
    """One shape per pair of lengths; what is not given is as in the benchmarks."""
    from fa3gen.design.family import Shape

    each = heads_of(spec, heads, heads_kv)
    return [Shape(batch or max(1, TOKENS // max(seq_q, seq_k)), seq_q, seq_k, *each) for seq_q, seq_k in lengths]


def heads_of(spec: Forward, heads: int | None, heads_kv: int | None) -> tuple[int, int]:
    """Query and kv heads as asked for; what is not given is as in the benchmarks, or what the tile packs."""
    from fa3gen.design import work

    default_q, default_kv = work.default_heads(spec)
    heads_q = heads or (default_q if heads_kv is None else heads_kv * spec.tile.pack_heads)
    return heads_q, heads_kv or (default_kv if heads is None else max(1, heads_q // spec.tile.pack_heads))


def compiled_registers(workspace: Workspace, variant: Variant) -> int | None:
    """Registers per thread of the module as compiled, from the evidence on the file as it stands."""
    from fa3gen.records import evidence

    return evidence.compiled_registers(workspace.place_of(variant), variant.stem)
