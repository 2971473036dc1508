"""`fa3gen simulate`: who waits for whom on one SM, and how many stages hide the loads."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fa3gen.cli import completion
from fa3gen.cli import lengths as lengths_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa3gen.design.family import PackedShape, Shape
    from fa3gen.design.workspace import Workspace
    from fa3gen.hardware.chips import Chip
    from fa3gen.inspect.simulation.document import Entry
    from fa3gen.spec.model import Forward
    from fa3gen.spec.specfile import Variant


class Arbitration(enum.StrEnum):
    """How the tensor cores choose between products of several warpgroups."""

    even = "even"
    oldest = "oldest"


def simulate(
    specs: Annotated[
        list[str],
        typer.Argument(
            metavar="SPEC", autocompletion=completion.specs, help="Spec files, spec stems or generated stems."
        ),
    ],
    stages: Annotated[
        str, typer.Option(metavar="N|N..M", help="Stages of K and V to compare; the picture is of the spec's own.")
    ] = "1..6",
    tiles: Annotated[int, typer.Option(min=1, max=512, help="Tiles of keys in the timeline.")] = 12,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,QxK,..|NAME",
            help=f"{lengths_option.HELP}; or chat16k and the like. Of dense tensors one length. Predicts the speed.",
        ),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Query heads, of --lengths (default: 2048 / head dim).")
    ] = None,
    heads_kv: Annotated[
        int | None, typer.Option(min=1, help="Heads of k and v (default: as many as of q, or as the tile packs).")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Print predicted speeds beside those that were measured, and no more.")
    ] = False,
    load_latency: Annotated[
        float | None,
        typer.Option(min=0, help="Cycles from the start of a tile's transfer to its landing, but for its bytes."),
    ] = None,
    load_rate: Annotated[float | None, typer.Option(min=0.001, help="Bytes a cycle that reach an SM.")] = None,
    product_time: Annotated[
        float | None, typer.Option(min=0.001, help="Cycles of each product of one warpgroup, alone.")
    ] = None,
    softmax_time: Annotated[
        float | None, typer.Option(min=0.001, help="Cycles of the softmax of one warpgroup, alone.")
    ] = None,
    ctas: Annotated[int | None, typer.Option(min=1, max=32, help="CTAs on the SM (default: as many as fit).")] = None,
    arbitration: Annotated[
        Arbitration,
        typer.Option(help="Products of several warpgroups in the timeline: the oldest first, or all evenly."),
    ] = Arbitration.oldest,
    chip: Annotated[str, typer.Option(autocompletion=completion.chips, help="h100 or h200.")] = "h200",
    svg_file: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draw the timeline of one module.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, with every span.")] = False,
) -> None:
    """Simulate the pipeline of loads, products and softmax on one SM: timeline, utilisation, stalls, stages.

    Warps do what the generated kernel does, in its order, and wait for what it waits for. Times are derived from the
    spec and the chip's peak rates; the load latency was measured. No tile is masked. Of sequences of given lengths the
    tiles, or parts of their keys, are dealt out to all SMs in the kernel's order, which share what HBM brings.
    docs/simulator.md says how well that predicts what was measured. Nothing is compiled or run.
    """
    from fa3gen.base.errors import UserError
    from fa3gen.design.workspace import Workspace
    from fa3gen.hardware import chips
    from fa3gen.spec.specfile import attention_only

    workspace = Workspace.find()
    [selected] = chips.select([chip])
    counts = parse_stages(stages)
    variants = attention_only(workspace.select(specs), "fa3gen simulate")
    if svg_file is not None and len(variants) > 1:
        names = ", ".join(variant.stem for variant in variants)
        raise UserError(f"--svg draws one module, and these are {len(variants)}: {names}; name one of them")
    if compare:
        if as_json:
            raise UserError("--compare prints tables; leave --json out")
        _compare(workspace, variants)
        return
    overrides = {
        "load_latency": load_latency,
        "load_rate": load_rate,
        "product_time": product_time,
        "softmax_time": softmax_time,
    }
    entries = [
        _entry(
            workspace,
            variant,
            chip=selected,
            counts=counts,
            tiles=tiles,
            ctas=ctas,
            order="even" if arbitration is Arbitration.even else "oldest",
            overrides=overrides,
            shape=_shape(variant, lengths, heads, heads_kv),
        )
        for variant in variants
    ]
    if svg_file is not None:
        _draw(entries[0], svg_file)
    if as_json:
        import json

        from fa3gen.inspect.simulation.document import document

        typer.echo(json.dumps(document(entries), separators=(",", ":")))
        return
    _print(entries, svg_file)


def parse_stages(text: str) -> list[int]:
    """`3` or `1..6` as numbers of stages; UserError for anything else."""
    from fa3gen.base.errors import UserError

    first, dots, last = text.partition("..")
    try:
        low, high = int(first), int(last if dots else first)
    except ValueError:
        low, high = 0, 0
    if not 1 <= low <= high <= 16:
        raise UserError(f"--stages {text}: write a number from 1 to 16, or a range such as 1..6")
    return list(range(low, high + 1))


def _entry(
    workspace: Workspace,
    variant: Variant[Forward],
    *,
    chip: Chip,
    counts: Sequence[int],
    tiles: int,
    ctas: int | None,
    order: Literal["even", "oldest"],
    overrides: dict[str, float | None],
    shape: Shape | PackedShape | None,
) -> Entry:
    from dataclasses import replace

    from fa3gen.cli.explain import compiled_registers
    from fa3gen.design.work import Problem
    from fa3gen.inspect import simulation
    from fa3gen.inspect.simulation.document import Entry

    spec, registers = variant.spec, compiled_registers(workspace, variant)
    times = simulation.times_of(spec, chip).overridden(**overrides)
    settings = simulation.settings_of(spec, tiles=tiles, registers=registers, ctas=ctas, arbitration=order)
    dealt = None
    if shape is not None:
        dealt = simulation.deal(Problem(spec, shape), times, chip, registers, order, ctas=ctas)
        settings, times = replace(settings, tiles=dealt.first_tiles(tiles)), dealt.times
    return Entry(
        stem=variant.stem,
        chip=chip.name,
        times=times,
        settings=settings,
        simulation=simulation.simulate(spec, times, settings),
        stages=simulation.sweep(spec, times, counts, registers=registers, ctas=ctas),
        dealt=dealt,
    )


def _shape(
    variant: Variant[Forward], lengths: str | None, heads: int | None, heads_kv: int | None
) -> Shape | PackedShape | None:
    """The problem that is asked for, if any; UserError where the module does not take it."""
    from fa3gen.base.errors import UserError
    from fa3gen.cli.explain import heads_of
    from fa3gen.design.family import Shape, call_of_lengths

    spec = variant.spec
    if lengths is None:
        if heads or heads_kv:
            raise UserError("--heads and --heads-kv are those of a problem: give its --lengths, too")
        return None
    sides = lengths_option.parse_sequences(lengths)
    if spec.problem.layout == "dense":
        (seq_q, *others_q), (seq_k, *others_k) = sides
        if {*others_q} - {seq_q} or {*others_k} - {seq_k}:
            raise UserError(
                f"{variant.stem} takes dense tensors, of which all sequences have one length; give --lengths like "
                "1x4096,1x4096, or decode8_on_4k"
            )
        return Shape(len(others_q) + 1, seq_q, seq_k, *heads_of(spec, heads, heads_kv))
    return call_of_lengths(spec, *sides, heads=heads_of(spec, heads, heads_kv))


def _compare(workspace: Workspace, variants: Sequence[Variant[Forward]]) -> None:
    """Print the cells of the records; UserError where there are none."""
    from rich.console import Console

    from fa3gen.base.errors import UserError
    from fa3gen.inspect.simulation import comparison, text

    found = list(comparison.cells(workspace, variants))
    if not found:
        names = ", ".join(variant.stem for variant in variants)
        raise UserError(
            f"no record holds speeds of {names}; fa3gen tune --measure MODULE... --write measures packed sequences"
        )
    text.show_cells(Console(highlight=False), found)


def _draw(entry: Entry, path: Path) -> None:
    from fa3gen.base.errors import UserError
    from fa3gen.base.files import write_text
    from fa3gen.inspect.simulation import svg

    try:
        write_text(path, svg(entry.simulation, f"{entry.stem}: one SM, simulated"))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another --svg") from None


def _print(entries: Sequence[Entry], drawn: Path | None) -> None:
    from rich.console import Console

    from fa3gen.inspect.simulation import text

    console = Console(highlight=False)
    for index, entry in enumerate(entries):
        if index:
            console.rule(style="dim")
        title = f"{entry.stem}: the pipeline on one SM of {entry.chip}, simulated"
        text.show(console, title, entry.times, entry.settings, entry.simulation, entry.stages)
        if entry.dealt is not None:
            text.show_problem(console, entry.dealt)
    if drawn is not None:
        console.print(f"wrote {drawn}", soft_wrap=True, markup=False)
