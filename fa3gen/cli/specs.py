"""`fa3gen list`, `fa3gen new` and `fa3gen schema`: the commands that deal with specs alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa3gen.cli import completion, masks

if TYPE_CHECKING:
    from fa3gen.design.workspace import Workspace
    from fa3gen.spec.model import Combine, Copy, Forward, Gemm, Quantize, Spec
    from fa3gen.spec.specfile import SpecFile, Variant


def list_specs(
    specs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SPEC", help="Only these specs or modules; all if none.", autocompletion=completion.specs
        ),
    ] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="Only this head dim; may be repeated.")] = None,
    mask: Annotated[list[str] | None, typer.Option(help=masks.HELP)] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Only this dtype, such as bf16 or e4m3; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per generated module.")] = False,
) -> None:
    """Show all specs, the modules they generate, and what each is."""
    from fa3gen.base.errors import UserError
    from fa3gen.cli.advice import note
    from fa3gen.design.workspace import Workspace

    workspace = Workspace.find()
    files, problems = workspace.survey()
    note(problems)
    if specs:
        files = _named(workspace, files, specs)
    wanted = {"head_dim": head_dim, "mask": [masks.name(word) for word in mask or ()], "dtype": dtype}
    chosen = [kept for file in files if (kept := _chosen(file, wanted)).variants]
    if files and not chosen:
        raise UserError(f"no module is like that; {_offered(files, wanted)}")
    if as_json:
        import json

        rows = [facts(file, variant.stem, variant.spec) for file in chosen for variant in file.variants]
        typer.echo(json.dumps(rows, indent=2))
    elif chosen:
        _print_table(chosen)
    else:
        typer.echo(f"There is no spec in {workspace.specs_dir}.")


def new_spec(
    name: Annotated[str, typer.Argument(help="Stem of the new spec: specs/NAME.yaml is written.")],
    base: Annotated[
        str,
        typer.Option(
            "--from", help="Spec to start from: a stem or a path.", metavar="SPEC", autocompletion=completion.specs
        ),
    ],
) -> None:
    """Write a new spec that extends another one, with hints of what can be overridden."""
    from fa3gen.base.errors import UserError
    from fa3gen.design.workspace import Workspace
    from fa3gen.spec.specfile import is_stem

    if not is_stem(name):
        raise UserError(f"'{name}' cannot name a Python module; use letters, digits and underscores")
    workspace = Workspace.find()
    target = workspace.specs_dir / f"{name}.yaml"
    if target.exists():
        raise UserError(f"{workspace.shown(target)} exists already; choose another name or edit that file")
    spec_file = _base_file(base, workspace)
    _refuse_taken_names(name, spec_file, workspace)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("x", encoding="utf-8") as stream:
        stream.write(derived_text(spec_file, _reference(spec_file, workspace)))
    typer.echo(f"wrote {workspace.shown(target)}\nnext: edit it, then run `fa3gen render {name}`")


def print_schema() -> None:
    """Print the JSON Schema of a spec file, for editors."""
    import json

    from fa3gen.spec.schema import file_schema

    typer.echo(json.dumps(file_schema(), indent=2))


# list


def _named(workspace: Workspace, files: Sequence[SpecFile], names: Sequence[str]) -> list[SpecFile]:
    """The spec files with those variants only that are named; behind `files` such as lie outside `specs/`."""
    from dataclasses import replace

    variants = workspace.select(names)
    known = {file.path: file for file in files}
    for variant in variants:
        if variant.source not in known:
            known[variant.source] = workspace.file_of(variant)
    stems = {(variant.source, variant.stem) for variant in variants}
    kept = (
        replace(file, variants=tuple(each for each in file.variants if (file.path, each.stem) in stems))
        for file in known.values()
    )
    return [file for file in kept if file.variants]


def _chosen(file: SpecFile, wanted: Mapping[str, Collection[Any] | None]) -> SpecFile:
    """The spec file with those variants only that have one of the wanted values of each field."""
    from dataclasses import replace

    def fits(variant: Variant) -> bool:
        has = _sought(variant.spec)
        return all(not values or has.get(field) in values for field, values in wanted.items())

    return replace(file, variants=tuple(variant for variant in file.variants if fits(variant)))


def _sought(spec: Spec) -> dict[str, Any]:
    """What one can ask the list for."""
    from fa3gen.design.family import mask_label
    from fa3gen.spec.model import Forward

    has: dict[str, Any] = {"dtype": spec.problem.dtype}
    if isinstance(spec, Forward):
        has |= {"head_dim": spec.problem.head_dim, "mask": mask_label(spec.mask)}
    return has


def _offered(files: Sequence[SpecFile], wanted: Mapping[str, Collection[Any] | None]) -> str:
    """The values that these modules have of what was asked for: `there is --dtype bf16 and --mask causal, full`."""
    found = [_sought(variant.spec) for file in files for variant in file.variants]
    offers = []
    for field in (field for field, values in wanted.items() if values):
        values = sorted({has[field] for has in found if field in has})
        offers.append(f"{'' if values else 'no '}--{field.replace('_', '-')} {', '.join(map(str, values))}".rstrip())
    return f"there is {' and '.join(offers)}"


def facts(file: SpecFile, stem: str, spec: Spec) -> dict[str, Any]:
    """What the list says of one module, as JSON values."""
    from fa3gen.spec.model import Combine, Copy, Forward, Gemm, Quantize

    known = {"spec": file.stem, "stem": stem, "summary": file.summary, "source": str(file.path)}
    match spec:
        case Forward():
            return {**known, **_attention_facts(spec)}
        case Gemm():
            return {**known, **_gemm_facts(spec)}
        case Copy():
            return {**known, **_copy_facts(spec)}
        case Combine():
            return {**known, **_combine_facts(spec)}
        case Quantize():
            return {**known, **_quantize_facts(spec)}


def _attention_facts(spec: Forward) -> dict[str, Any]:
    from fa3gen.design.family import Family

    tile = spec.tile
    workers = f"{tile.warpgroups} wg" if tile.warpgroups else f"{tile.threads} thr"
    return {
        "head_dim": spec.problem.head_dim,
        "head_dim_v": spec.problem.v_dim,
        "dtype": Family.of(spec).dtypes,
        "mask": _mask_text(spec),
        "layout": spec.problem.layout,
        "tile": f"{tile.q}x{tile.kv} {workers}",
        "load": _load_text(spec),
        "products": f"{spec.qk.engine}/{spec.pv.engine}",
        "handoff": spec.handoff.through,
        "lse": spec.outputs.lse,
    }


def _copy_facts(spec: Copy) -> dict[str, Any]:
    box, ring = spec.box, spec.ring
    return {
        "operation": spec.operation,
        "dtype": spec.problem.dtype,
        "layout": spec.problem.layout,
        "tile": "x".join(map(str, (*box.extents[:-1], spec.problem.row))),
        "box": f"{'x'.join(map(str, box.extents))} {box.swizzle} {box.wide}",
        "ring": None if ring is None else f"{ring.stages} stages, {ring.ctas_per_sm} CTAs on an SM",
    }


def _combine_facts(spec: Combine) -> dict[str, Any]:
    return {
        "operation": spec.operation,
        "dtype": spec.problem.dtype,
        "threads": f"{spec.cta.threads}, {spec.cta.per_sm} CTAs on an SM",
        "parts": f"{spec.parts.at_once} at once, in up to {spec.parts.shares} shares",
    }


def _quantize_facts(spec: Quantize) -> dict[str, Any]:
    problem, tile = spec.problem, spec.tile
    return {
        "operation": spec.operation,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim,
        "dtype": problem.dtype,
        "tile": f"{tile.rows} rows {tile.threads} thr",
        "rotate": problem.rotate,
        "transpose": problem.transpose,
        "scale": problem.scale,
    }


def _gemm_facts(spec: Gemm) -> dict[str, Any]:
    from fa3gen.design import gemm

    tile, (a, b) = spec.tile, gemm.majors(spec)
    workers = f"{tile.warpgroups} wg" if tile.warpgroups else f"{tile.threads} thr"
    return {
        "dtype": (
            spec.problem.dtype if spec.d_dtype == spec.problem.dtype else f"{spec.problem.dtype}, D in {spec.d_dtype}"
        ),
        "tile": f"{tile.m}x{tile.n}x{tile.k} {workers}",
        "load": f"{spec.load.engine} x{spec.load.stages}",
        "product": spec.product.engine,
        "majors": f"{a}/{b}",
    }


def _mask_text(spec: Forward) -> str:
    mask = spec.mask
    if mask.kind != "window":
        return mask.kind
    return "any window" if mask.given else f"window {mask.left}, {mask.right}"


def _load_text(spec: Forward) -> str:
    load = spec.load
    if load.engine == "sync":
        return "sync"
    return f"{load.engine} x{load.kv_stages}"


_COLUMNS = {
    "d": "head_dim",
    "dtype": "dtype",
    "mask": "mask",
    "tile": "tile",
    "load": "load",
    "QK/PV": "products",
    "P through": "handoff",
    "product": "product",
    "A/B major": "majors",
    "layout": "layout",
    "box": "box",
    "ring": "ring",
    "threads": "threads",
    "parts": "parts",
    "rotated": "rotate",
    "transposed": "transpose",
    "scale of": "scale",
}


def _print_table(files: Sequence[SpecFile]) -> None:
    """A table for each spec; what all its modules have in common stands once above them, to fit a narrow terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=1000, highlight=False)  # a pipe or a file has no width to fit into
    for file in files:
        rows = [facts(file, variant.stem, variant.spec) for variant in file.variants]
        for row in rows:
            if row.get("head_dim_v") != row.get("head_dim"):
                row["head_dim"] = f"{row['head_dim']}/{row['head_dim_v']}"
        columns = {name: key for name, key in _COLUMNS.items() if key in rows[0]}
        differing = [name for name, key in columns.items() if len({row[key] for row in rows}) > 1]
        # Cells and titles are Text: a plain string with square brackets in it would be taken for markup.
        console.print(Text.assemble((file.stem, "bold"), f": {file.summary}"))
        common = (f"{name} {rows[0][key]}" for name, key in columns.items() if name not in differing)
        console.print(Text("; ".join(common), style="dim"))
        table = Table(box=None, pad_edge=False, header_style="dim", show_header=bool(differing))
        table.add_column("  module", no_wrap=True)
        for name in differing:
            table.add_column(name)
        for row in rows:
            table.add_row(Text(f"  {row['stem']}"), *(Text(str(row[_COLUMNS[name]])) for name in differing))
        console.print(table)
        console.print()


# new


def derived_text(base: SpecFile, reference: str) -> str:
    """A spec file that extends `base` (named `reference` from where it lies) and changes nothing yet."""
    from fa3gen.spec.yamltree import dumps

    hints = {key: value for key, value in _without_axes(base.fields, list(base.matrix)).items() if value != {}}
    if base.matrix:
        hints["matrix"] = {path: [_short_mask(value) for value in values] for path, values in base.matrix.items()}
    head = {"summary": f"As {base.stem}; say here in one line what is different", "extends": reference}
    commented = "".join(f"# {line}\n" for line in dumps(hints, flow=None).splitlines())
    return (
        f"{dumps(head, flow=False)}\n"
        f"# What follows is inherited from {base.stem}. Uncomment what is to differ; keys left out keep their value.\n"
        "# A matrix given here replaces the inherited one as a whole (`matrix: {}`: a single module). Fields that the\n"
        "# matrix sets are changed there.\n"
        f"{commented}"
    )


def _without_axes(fields: dict[str, Any], axes: Sequence[str], prefix: str = "") -> dict[str, Any]:
    """The fields that no axis of the matrix sets."""
    kept: dict[str, Any] = {}
    for key, value in fields.items():
        path = f"{prefix}{key}"
        if path not in axes:
            kept[key] = _without_axes(value, axes, f"{path}.") if isinstance(value, dict) else value
    return kept


def _short_mask(value: Any) -> Any:
    """`causal` for `{kind: causal}`, as people write it."""
    return value["kind"] if isinstance(value, dict) and list(value) == ["kind"] else value


def _base_file(name: str, workspace: Workspace) -> SpecFile:
    from pathlib import Path

    from fa3gen.base.errors import UserError

    spec_file = workspace.file_of(workspace.resolve(name)[0])
    if name not in (spec_file.stem, str(spec_file.path)) and Path(name).suffix not in (".yaml", ".yml"):
        raise UserError(f"'{name}' is one module of the spec {spec_file.stem}; use --from {spec_file.stem}")
    return spec_file


def _reference(base: SpecFile, workspace: Workspace) -> str:
    """How a file in the workspace's specs names the base: its stem, or for a stray file its path."""
    import os

    path = workspace.find_spec(base.path)
    if path.suffix == ".yaml" and path.resolve().parent in (
        workspace.specs_dir.resolve(),
        workspace.bundled_specs_dir.resolve(),
    ):
        return base.stem
    return os.path.relpath(path.resolve(), workspace.specs_dir.resolve())


def _refuse_taken_names(name: str, base: SpecFile, workspace: Workspace) -> None:
    """The new spec would generate the base's modules under its own stem: none of these may be in use."""
    from fa3gen.base.errors import UserError

    known, _ = workspace.survey()
    taken = {stem: file for file in known for stem in (file.stem, *(v.stem for v in file.variants))}
    wanted = [name, *(name + variant.stem.removeprefix(base.stem) for variant in base.variants)]
    clash = next((stem for stem in wanted if stem in taken), None)
    if clash is not None:
        raise UserError(f"the name '{clash}' is taken by {taken[clash].path}; choose another name than '{name}'")
