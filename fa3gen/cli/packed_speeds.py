"""Speeds of modules for packed sequences and pages: what `fa3gen bench` shows, and `fa3gen tune --measure` records."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fa3gen.base.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from fa3gen.design.workspace import Workspace
    from fa3gen.measure.packed_speeds import PackedCompetitor, Speed
    from fa3gen.records.packed_records import PackedProblem, PackedRecord
    from fa3gen.run.gpu import Environment
    from fa3gen.spec.model import Forward
    from fa3gen.spec.specfile import Variant

    Cells = list[tuple[PackedProblem, list[Variant[Forward]]]]
    Measured = list[tuple[PackedProblem, list[Speed]]]

QUICK_ROUNDS = 3


def is_packed(variant: Variant[Forward]) -> bool:
    """Whether a module takes packed sequences or pages."""
    return variant.spec.problem.layout != "dense"


def refuse(options: dict[str, Any]) -> None:
    """Raise UserError for options, by name, that say something and that packed sequences have no use for."""
    if idle := [name for name, value in options.items() if value]:
        raise UserError(
            f"modules for packed sequences are timed at lists of lengths of their own, and have no {', '.join(idle)}; "
            "leave that out, or name modules for dense tensors in a command of their own"
        )


def _cells_of(workspace: Workspace, modules: Sequence[Variant[Forward]]) -> Cells:
    """The cells that these modules can serve, each with all modules that can.

    Raises UserError where one serves none, or is not rendered.
    """
    from fa3gen.measure import packed_cells

    if unrendered := [variant for variant in modules if not workspace.path_of(variant).is_file()]:
        raise workspace.not_rendered(unrendered)
    stems = [variant.stem for variant in modules]
    found = [
        (problem, variants)
        for problem, variants in packed_cells.cells(workspace, modules)
        if any(variant.stem in stems for variant in variants)
    ]
    served = {variant.stem for _, variants in found for variant in variants}
    if missing := [stem for stem in stems if stem not in served]:
        heads = ", ".join(str(dim) for dim in packed_cells.HEADS)
        raise UserError(
            f"no list of lengths is for {', '.join(missing)}: there are some for v as wide as k and head dims {heads}, "
            "and heads in the groups that modules take; see fa3gen/measure/packed_cells.py"
        )
    return found


def _speeds(
    workspace: Workspace,
    cells: Cells,
    peers: Sequence[PackedCompetitor],
    say: Callable[[str], None],
    command: str,
    **how: Any,
) -> Iterator[tuple[PackedProblem, list[Speed]]]:
    """Compile the modules, as many at once as there are CPUs, and measure cell after cell on the Hopper GPU."""
    from concurrent.futures import ThreadPoolExecutor

    from fa3gen.compile.cache import cached_compile_for_launch
    from fa3gen.measure.bench import require_hopper
    from fa3gen.measure.packed_speeds import measure, module_competitor
    from fa3gen.measure.tuning.measuring import CudaTimer

    device, jobs = require_hopper(command), how.pop("jobs", None)
    files = {workspace.path_of(variant) for _, variants in cells for variant in variants}
    say(f"{len(cells)} cells, {len(files)} modules")
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(cached_compile_for_launch, sorted(files)))
    for number, (problem, variants) in enumerate(cells, 1):
        own = [module_competitor(variant, workspace.path_of(variant)) for variant in variants]
        speeds = measure(problem, [*own, *peers], device, CudaTimer(device), **how)
        told = ", ".join(f"{one.name} {one.tflops:.0f}" for one in speeds if one.tflops is not None)
        say(f"[{number}/{len(cells)}] {problem.label}: {told}")
        yield problem, speeds


# fa3gen bench


def bench(
    workspace: Workspace,
    variants: Sequence[Variant[Forward]],
    *,
    head_dims: Collection[int],
    masks: Collection[str],
    lists: Collection[str],
    quick: bool,
    peers: bool,
    json_path: Path | None,
    say: Callable[[str], None],
) -> bool:
    """Time these modules at the lists of lengths, beside peers, and show the speeds; whether one of them failed.

    Raises UserError where no cell is left, or no GPU is there.
    """
    from rich.console import Console

    from fa3gen.design.family import mask_label
    from fa3gen.design.masks import of_call
    from fa3gen.measure.packed_speeds import ROUNDS, peer_competitors

    stems = [variant.stem for variant in variants]
    every = [
        (problem, [variant for variant in able if variant.stem in stems])
        for problem, able in _cells_of(workspace, variants)
    ]
    cells = [
        (problem, able)
        for problem, able in every
        if (not head_dims or problem.head_dim in head_dims)
        and (not masks or mask_label(of_call(problem.mask.spec_mask())) in masks)
        and (not lists or problem.lengths in lists)
    ]
    if not cells:
        offered = ", ".join(dict.fromkeys(problem.lengths for problem, _ in every))
        raise UserError(f"no cell is left; the lists of lengths of these modules are {offered}")
    how = {"rounds": QUICK_ROUNDS if quick else ROUNDS}
    measured = list(_speeds(workspace, cells, peer_competitors() if peers else [], say, "fa3gen bench", **how))
    console = Console()
    for title, table in tables(measured):
        console.print(title, markup=False, highlight=False, soft_wrap=True)
        console.print(table)
    for reason in reasons(measured):
        console.print(reason, style="dim", markup=False, highlight=False)
    if json_path is not None:
        _write_json(_as_dict(measured), json_path)
    return any(one.failed for _, speeds in measured for one in speeds)


def tables(measured: Measured) -> Iterator[tuple[str, Table]]:
    """One table of TFLOP/s for each family and heads, and its title: a column for each list; the best is bold."""
    from rich.table import Table

    panels: dict[str, Measured] = {}
    for problem, speeds in measured:
        panels.setdefault(problem.label.replace(f" {problem.lengths},", ","), []).append((problem, speeds))
    for title, cells in panels.items():
        table = Table("kernel")
        rows: dict[str, list[str]] = {}
        for place, (problem, speeds) in enumerate(cells):
            table.add_column(problem.lengths, justify="right")
            best = max((one.tflops for one in speeds if one.tflops is not None), default=None)
            for one in speeds:
                text = "" if one.tflops is None else f"{one.tflops:.0f}{'' if one.captured else ' (eager)'}"
                row = rows.setdefault(one.name, [""] * len(cells))
                row[place] = f"[bold]{text}[/]" if text and one.tflops == best else text
        for name, texts in rows.items():
            table.add_row(name, *texts)
        yield f"TFLOP/s, {title}; replayed from a CUDA graph", table


def reasons(measured: Measured) -> list[str]:
    """Why a speed is missing, each reason once, with where it applies if not everywhere."""
    places: dict[str, list[str]] = {}
    for problem, speeds in measured:
        for one in speeds:
            if one.reason is not None:
                places.setdefault(f"{one.name}: {one.reason}", []).append(problem.label)
    return [text + ("" if len(where) == len(measured) else f" ({'; '.join(where)})") for text, where in places.items()]


def _as_dict(measured: Measured) -> dict[str, Any]:
    from dataclasses import asdict

    from fa3gen.run import gpu

    cells = [
        {"problem": problem.model_dump(mode="json"), "results": [asdict(one) for one in speeds]}
        for problem, speeds in measured
    ]
    return {"version": 1, "environment": asdict(gpu.environment()), "cells": cells}


# fa3gen tune --measure


def record(
    workspace: Workspace,
    variants: Sequence[Variant[Forward]],
    *,
    rounds: int | None,
    burst_ms: float,
    jobs: int | None,
    write: bool,
    json_path: Path | None,
    say: Callable[[str], None],
) -> None:
    """Time all modules of every cell that one of these can serve; with `write`, write a record for each cell at once.

    So what was measured stays when it is interrupted. Raises UserError for modules of which there are no records
    here, and in the end for such that compute something wrong, or cannot be timed: their cells have no record.
    """
    from fa3gen.measure.packed_speeds import ROUNDS
    from fa3gen.records import packed_records
    from fa3gen.run import gpu

    workspace.require_recordable(variants)
    cells = _cells_of(workspace, variants)
    able, around = {problem.file_name: own for problem, own in cells}, gpu.environment()
    records, failed = [], []
    how = {"rounds": rounds or ROUNDS, "burst_ms": burst_ms, "jobs": jobs}
    for problem, speeds in _speeds(workspace, cells, (), say, "fa3gen tune", **how):
        failed += (wrong := [f"{one.name}: {one.reason}, {problem.label}" for one in speeds if one.failed])
        if wrong:
            continue
        records.append(_record_of(workspace, problem, able[problem.file_name], speeds, around))
        if write:
            packed_records.save(workspace, records[-1:])
    if write:
        say(f"wrote {len(records)} records to {packed_records.directory(workspace)}; now: fa3gen tune --write-table")
    if json_path is not None:
        _write_json([one.model_dump(mode="json") for one in records], json_path)
    if failed:
        raise UserError("; ".join(failed))


def _record_of(
    workspace: Workspace,
    problem: PackedProblem,
    variants: Sequence[Variant[Forward]],
    speeds: Sequence[Speed],
    around: Environment,
) -> PackedRecord:
    from fa3gen.measure.bench import require_hopper
    from fa3gen.records import packed_records
    from fa3gen.records.packed_records import PackedRecord
    from fa3gen.run import gpu

    index = require_hopper().index or 0
    found = {one.name: one.tflops for one in speeds}
    of_modules = [(variant, speed) for variant in variants if (speed := found[variant.stem]) is not None]
    return PackedRecord(
        gpu=str(around.gpu),
        sms=gpu.sm_count(index) or 0,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        torch=around.torch,
        dsl=around.dsl,
        problem=problem,
        results=packed_records.results_of(workspace, of_modules),
    )


def _write_json(document: Any, path: Path) -> None:
    from fa3gen.base.files import write_text

    write_text(path, json.dumps(document, indent=2) + "\n")
    typer.echo(f"wrote {path}", err=True)
