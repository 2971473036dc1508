"""Which generated module `fa3gen.attention` calls: the first row of a table that fits, and how that table is made.

The table is `fa3gen/dispatch.yaml`, written from tuning records by `fa3gen tune --write-table` and never by hand. A row
says for which dtype, head dims, mask and number of keys it stands, names one module by its stem and its SHA-256, and
holds what was measured there. A workspace of your own has its own table, `dispatch.yaml` beside `specs/`, whose rows
come before those of the package. Where no row fits, a module that was never measured is taken only when there is no
choice: one that fits exactly, or one of the production set (`fwd_*`) among those that do.

Imports neither torch nor cutlass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

from fa3gen.errors import Problem, SpecError, UserError
from fa3gen.evidence import sha256
from fa3gen.spec import WINDOW_MAX, CausalMask, DType, Mask, NoMask, Spec, SpecModel, WindowMask
from fa3gen.specfile import Variant
from fa3gen.workspace import Workspace
from fa3gen.yamltree import read

if TYPE_CHECKING:
    from fa3gen.tuning_records import TuningRecord

FILE_NAME = "dispatch.yaml"
WRITE_TABLE = "fa3gen tune --write-table"
PRODUCTION_PREFIX = "fwd_"
DIGEST_LENGTH = 16  # hex digits of a SHA-256 in a row: enough to tell one file from another, and short enough to read

_HEADER = f"""\
# Which module fa3gen.attention calls: the first row that fits. Speeds in TFLOP/s; runner_up is the best other module of
# the same run. Written from generated/evidence/tuning by `{WRITE_TABLE}`; do not edit.
"""


def measuring(stems: Sequence[str]) -> str:
    """The command that measures modules and writes the table anew."""
    return f"fa3gen tune --measure {' '.join(stems)} --write --write-table"


class NoKernel(UserError, ValueError):
    """No generated module computes what was asked for, or nothing says which of several is to be taken."""


class ArgumentError(UserError, ValueError):
    """An argument of `fa3gen.attention` that makes no sense."""


class Measurement(SpecModel):
    """One measured length of a row: the speed of its module and of the best other one, TFLOP/s."""

    seq: int = Field(gt=0, description="Queries, and as many keys.")
    tflops: float = Field(gt=0)
    runner_up: str | None = None
    runner_up_tflops: float | None = None
    gpu: str

    def __str__(self) -> str:
        """`at 1024 keys 455 TFLOP/s; k6_d128 420 (NVIDIA H200)`."""
        other = "nothing else was measured" if self.runner_up is None else f"{self.runner_up} {self.runner_up_tflops:g}"
        return f"at {self.seq} keys {self.tflops:g} TFLOP/s; {other} ({self.gpu})"


class Region(SpecModel):
    """Numbers of keys up to and including `up_to`."""

    up_to: int = Field(gt=0)


class Row(SpecModel):
    """One row: for which calls it stands, which module serves them, and why. No `seq_k`: any number of keys."""

    dtype: DType
    head_dim: int = Field(gt=0)
    head_dim_v: int = Field(gt=0)
    mask: Mask
    seq_k: Region | None = None
    module: str
    sha256: str = Field(pattern=f"^[0-9a-f]{{{DIGEST_LENGTH}}}$", description="First digits, of the measured file.")
    measured: list[Measurement] = Field(min_length=1)

    def serves(self, family: Family, seq_k: int) -> bool:
        """Whether this row stands for a call."""
        return self.family == family and (self.seq_k is None or seq_k <= self.seq_k.up_to)

    @property
    def family(self) -> Family:
        """What its module is compiled for."""
        return Family(self.dtype, self.head_dim, self.head_dim_v, self.mask)

    @property
    def region(self) -> str:
        """`up to 1024 keys` or `any number of keys`."""
        return f"up to {self.seq_k.up_to} keys" if self.seq_k else "any number of keys"


class Table(SpecModel):
    """All rows, in the order in which they are looked at."""

    rows: list[Row]


@dataclass(frozen=True)
class Family:
    """What a module is compiled for: modules of one family compute the same, at any shape."""

    dtype: DType
    head_dim: int
    head_dim_v: int
    mask: Mask

    @classmethod
    def of(cls, spec: Spec) -> Family:
        """The family of a spec's module."""
        return cls(spec.problem.dtype, spec.problem.head_dim, spec.problem.v_dim, spec.mask)

    def __str__(self) -> str:
        """`bf16, head dim 192/128, window (512, 0)`."""
        return f"{self.dtype}, head dim {self.dims}, {mask_text(self.mask)}"

    @property
    def dims(self) -> str:
        """`128`, or `192/128`: of q and k, and of v and O where they differ."""
        return f"{self.head_dim}" + ("" if self.head_dim_v == self.head_dim else f"/{self.head_dim_v}")


def mask_text(mask: Mask) -> str:
    """`no mask`, `causal` or `window (512, 0)`."""
    if isinstance(mask, WindowMask):
        return f"window ({mask.left}, {mask.right})"
    return "causal" if isinstance(mask, CausalMask) else "no mask"


def mask_of(causal: bool, window: Sequence[int] | None) -> Mask:
    """The mask that `causal` and `window` = (left, right) ask for: both together hide what either hides.

    Raises ArgumentError for a window that is no pair of whole numbers from 0 to 2^30.
    """
    if window is None:
        return CausalMask() if causal else NoMask()
    reach = tuple(window) if isinstance(window, (tuple, list)) else ()
    if len(reach) != 2 or any(type(keys) is not int or not 0 <= keys <= WINDOW_MAX for keys in reach):
        raise ArgumentError(
            f"window is {window!r}; it needs to be None or (left, right), how many keys a query sees left and right of "
            f"the diagonal, each from 0 to {WINDOW_MAX}"
        )
    left, right = reach
    return WindowMask(left=left, right=0 if causal else right)


# The choice


@dataclass(frozen=True)
class Choice:
    """The module for a call, and why: a row of the table, or (None) that no row fits and nothing else does."""

    stem: str
    file: Path
    spec: Spec
    source: Path
    row: Row | None
    reason: str

    def __str__(self) -> str:
        """The module, its spec in short, and why, in a few lines."""
        spec = self.spec
        how = f"tile {spec.tile.q} x {spec.tile.kv}, loads {spec.load.engine}, schedule {spec.schedule.kind}"
        lines = [f"{self.file}", f"  spec  {self.source}: {Family.of(spec)}; {how}", f"  why   {self.reason}"]
        return "\n".join([*lines, *(f"        {measured}" for measured in (self.row.measured if self.row else ()))])


def choose(family: Family, seq_k: int, *, lse: bool, workspace: Workspace) -> Choice:
    """The module that serves a call with `seq_k` keys; `lse`: LSE is wanted too.

    Raises NoKernel when there is none, when several fit and none was measured, and when the module of the row is
    missing or not the file that was measured. Raises UserError for a table that cannot be read.
    """
    for home, path in tables(workspace):
        for number, row in enumerate(read_table(path).rows, 1):
            if not row.serves(family, seq_k):
                continue
            choice = _of_row(home, row, _place(home, path, number, row))
            if choice.spec.outputs.lse or not lse:
                return choice
    return _unmeasured(family, lse, workspace)


def stretch(family: Family, seq_k: int, workspace: Workspace) -> tuple[int, int | None]:
    """The least and the largest number of keys around `seq_k` with the same choice; None: all larger ones too."""
    bounds = [
        row.seq_k.up_to
        for _, path in tables(workspace)
        for row in read_table(path).rows
        if row.family == family and row.seq_k is not None
    ]
    first = max((bound + 1 for bound in bounds if bound < seq_k), default=0)
    return first, min((bound for bound in bounds if bound >= seq_k), default=None)


def tables(workspace: Workspace) -> Iterator[tuple[Workspace, Path]]:
    """The tables there are, first the workspace's own, each with the workspace that its modules lie in."""
    own = table_path(workspace)
    package = Workspace(workspace.bundled, workspace.bundled)
    if workspace.root != workspace.bundled and own.is_file():
        yield workspace, own
    yield package, table_path(package)


def table_path(workspace: Workspace) -> Path:
    """Where a workspace's table lies: that of the package's own data is part of the package."""
    if workspace.root == workspace.bundled:
        return Path(__file__).with_name(FILE_NAME)
    return workspace.root / FILE_NAME


def _place(home: Workspace, path: Path, number: int, row: Row) -> str:
    """`fa3gen/dispatch.yaml, row 3 (bf16, head dim 128, causal, up to 1024 keys)`."""
    return f"{home.shown(path)}, row {number} ({row.family}, {row.region})"


def _of_row(home: Workspace, row: Row, place: str) -> Choice:
    """The module of a row. Raises NoKernel when it is missing, was not the one measured, or computes something else."""
    file = home.module_path(row.module)
    if not file.is_file():
        raise NoKernel(f"{place} names {row.module}, and {file} does not exist; run: fa3gen render {row.module}")
    if sha256(file)[:DIGEST_LENGTH] != row.sha256:
        raise NoKernel(
            f"{place} was measured with another {row.module} than the present {file}; "
            f"measure it again: {measuring([row.module])}"
        )
    variant = next((found for found in home.resolve(row.module) if found.stem == row.module), None)
    if variant is None:
        raise NoKernel(f"{place} names {row.module}, which is a spec with several modules; run: {WRITE_TABLE}")
    if (computed := Family.of(variant.spec)) != row.family:
        raise NoKernel(f"{place} is served by {row.module}, and that computes {computed}; run: {WRITE_TABLE}")
    return Choice(row.module, file, variant.spec, variant.source, row, place)


def _unmeasured(family: Family, lse: bool, workspace: Workspace) -> Choice:
    """The module to take without a measurement, when there is no choice. Raises NoKernel when there is one, or none."""
    modules = list(_modules(workspace))
    fitting: dict[str, tuple[Variant, Path]] = {}
    for variant, file in modules:
        if Family.of(variant.spec) == family and (variant.spec.outputs.lse or not lse):
            fitting.setdefault(variant.stem, (variant, file))  # the workspace's own come first
    production = [stem for stem in fitting if stem.startswith(PRODUCTION_PREFIX)]
    only = production if len(production) == 1 else list(fitting)
    if len(only) == 1:
        variant, file = fitting[only[0]]
        what = "module" if len(fitting) == 1 else "production module"
        reason = f"no row of the table is for {family}: no measurement, but this is the only {what} that fits"
        return Choice(variant.stem, file, variant.spec, variant.source, None, reason)
    if fitting:
        stems = production or only
        raise NoKernel(
            f"several modules compute {family}, and no row of the table says which is best: {', '.join(stems)}; "
            f'call one of them, fa3gen.load("{stems[-1]}").attention(...), or measure them on your GPU: '
            f"{measuring(stems)}"
        )
    raise NoKernel(_nothing(family, lse, [variant for variant, _ in modules]))


def _modules(workspace: Workspace) -> Iterator[tuple[Variant, Path]]:
    """Every rendered module, those of the workspace first. Specs of the workspace that are broken have none."""
    package = Workspace(workspace.bundled, workspace.bundled)
    for home in (workspace, package) if workspace.root != workspace.bundled else (package,):
        for path in home.spec_files():
            try:
                variants = home.load(path).variants
            except SpecError:
                continue
            yield from ((v, file) for v in variants if (file := home.module_path(v.stem)).is_file())


def _nothing(family: Family, lse: bool, variants: Sequence[Variant]) -> str:
    """What to say when no module fits: what there is, and how to make one."""
    served_dims: dict[str, set[str]] = {}
    for variant in variants:
        if variant.spec.outputs.lse or not lse:
            served = Family.of(variant.spec)
            served_dims.setdefault(f"{served.dtype}, {mask_text(served.mask)}", set()).add(served.dims)
    there = "; ".join(
        f"{what}: {', '.join(sorted(found, key=_natural))}" for what, found in sorted(served_dims.items())
    )
    compiled_in = " (the reach of a window is compiled in)" if isinstance(family.mask, WindowMask) else ""

    def likeness(variant: Variant) -> tuple[bool, bool, bool]:
        same_mask, same_dim = (
            variant.spec.mask.kind == family.mask.kind,
            variant.spec.problem.head_dim == family.head_dim,
        )
        return same_mask, same_dim, variant.stem.startswith(PRODUCTION_PREFIX)

    base = max(variants, key=likeness).source.stem if variants else "k4_2"
    mask = json.dumps(family.mask.model_dump()).replace('"', "")
    dims = f"head_dim: {family.head_dim}"
    if family.head_dim_v != family.head_dim:
        dims += f", head_dim_v: {family.head_dim_v}"
    fields = f"`problem: {{{dims}, dtype: {family.dtype}}}` and `mask: {mask}`"
    return (
        f"no generated module computes {family}{', with LSE' if lse else ''}{compiled_in}; head dims served: "
        f"{there or 'none'}. Make one: fa3gen new mine --from {base}, write {fields} into it, fa3gen render mine"
    )


def _natural(dims: str) -> list[int]:
    return [int(number) for number in dims.split("/")]


# The table's file


def read_table(path: Path) -> Table:
    """Read a table. Raises UserError, with every problem, when it is not one."""
    problems: list[Problem] = []
    tree = read(path, path, problems)
    if tree is None or problems:
        raise _spoilt(path, "; ".join(str(problem) for problem in problems))
    try:
        return Table.model_validate(tree.plain())
    except ValidationError as error:
        first = error.errors()[0]
        raise _spoilt(path, f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from None


def _spoilt(path: Path, why: str) -> UserError:
    return UserError(f"{path} is no dispatch table ({why}); write it anew: {WRITE_TABLE}")


def table_text(table: Table) -> str:
    """The YAML text of a table, the same for the same rows; `read_table` reads it back."""
    if not table.rows:
        return f"{_HEADER}rows: []\n"
    lines = [_HEADER + "rows:"]
    for row in table.rows:
        facts: dict[str, Any] = row.model_dump(exclude_none=True)
        measured = facts.pop("measured")
        facts["mask"] = facts["mask"] if isinstance(row.mask, WindowMask) else row.mask.kind
        entries = [f"{name}: {_flow(value)}" for name, value in facts.items()]
        lines += [f"- {entries[0]}", *(f"  {entry}" for entry in entries[1:]), "  measured:"]
        lines += [f"  - {_flow(measurement)}" for measurement in measured]
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """A value on one line; strings that YAML would read as something else are quoted."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_flow(item)}" for name, item in value.items()) + "}"
    if isinstance(value, str):
        return value if re.fullmatch(r"[A-Za-z][\w .()/-]*(?<! )", value) and value != "null" else json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


# From records to the table


@dataclass(frozen=True)
class _Won:
    """One measured length: which file won, and its measurement."""

    stem: str
    digest: str
    measurement: Measurement


def table_from_records(records: Iterable[TuningRecord]) -> str:
    """The text of the table that tuning records give, for `table_path`; raises as `rows_from_records`."""
    return table_text(Table(rows=rows_from_records(records)))


def rows_from_records(records: Iterable[TuningRecord]) -> list[Row]:
    """The rows that tuning records give.

    Only records with as many queries as keys count, and of them only modules that can write LSE, since every row has to
    serve `return_lse=True`: where the winner cannot, the fastest that can stands in. For each dtype, head dims and mask
    the measured lengths are taken in order, and neighbours with the same winner make one row, which ends at the last
    of these lengths. The last row has no end; the first begins at one key. Raises UserError where two records of one
    length have different winners.
    """
    won: dict[Family, dict[int, _Won]] = {}
    for record in records:
        if record.problem.seq_q == record.problem.seq_k and (winner := _winner(record)) is not None:
            by_length = won.setdefault(_family(record), {})
            known = by_length.setdefault(record.problem.seq_k, winner)
            if (known.stem, known.digest) != (winner.stem, winner.digest):
                raise UserError(
                    f"two tuning records of {_family(record)}, {record.problem.seq_k} keys have different winners, "
                    f"{known.stem} ({known.measurement.gpu}) and {winner.stem} ({winner.measurement.gpu}), and the "
                    "table has one row for both; delete one of them in generated/evidence/tuning"
                )
    return [row for family in sorted(won, key=_order) for row in _rows(family, won[family])]


def _family(record: TuningRecord) -> Family:
    problem = record.problem
    return Family(problem.dtype, problem.head_dim, problem.head_dim_v, problem.mask.spec_mask())


def _order(family: Family) -> tuple[Any, ...]:
    mask = family.mask
    reach = (mask.left, mask.right) if isinstance(mask, WindowMask) else (0, 0)
    kinds = ("none", "causal", "window")
    return family.dtype, family.head_dim, family.head_dim_v, kinds.index(mask.kind), reach


def _winner(record: TuningRecord) -> _Won | None:
    """Who won among the modules that can write LSE; None when there is no such module."""
    able = [result for result in record.results if result.spec.get("outputs", {}).get("lse", True)]
    ranked = sorted(able, key=lambda result: (result.stem != record.winner, -result.tflops))
    if not ranked:
        return None
    best, others = ranked[0], [result for result in record.results if result.stem != ranked[0].stem]
    second = max(others, key=lambda result: result.tflops, default=None)
    measurement = Measurement(
        seq=record.problem.seq_k,
        tflops=best.tflops,
        runner_up=second.stem if second else None,
        runner_up_tflops=second.tflops if second else None,
        gpu=record.gpu,
    )
    return _Won(best.stem, best.sha256[:DIGEST_LENGTH], measurement)


def _rows(family: Family, won: Mapping[int, _Won]) -> Iterator[Row]:
    """Rows of one family, by length."""
    merged: list[list[_Won]] = []
    for _, winner in sorted(won.items()):
        if merged and (merged[-1][0].stem, merged[-1][0].digest) == (winner.stem, winner.digest):
            merged[-1].append(winner)
        else:
            merged.append([winner])
    for number, run in enumerate(merged, 1):
        yield Row(
            dtype=family.dtype,
            head_dim=family.head_dim,
            head_dim_v=family.head_dim_v,
            mask=family.mask,
            seq_k=None if number == len(merged) else Region(up_to=run[-1].measurement.seq),
            module=run[0].stem,
            sha256=run[0].digest,
            measured=[winner.measurement for winner in run],
        )


def check_table(workspace: Workspace, records: Iterable[TuningRecord]) -> list[str]:
    """What is wrong with the workspace's table: other rows than the records give, and rows without their module.

    Each with the command that mends it; nothing when all is well. Raises UserError as `read_table` and
    `rows_from_records`.
    """
    path = table_path(workspace)
    table = read_table(path)
    wrong = []
    if path.read_text(encoding="utf-8") != table_from_records(records):
        wrong.append(f"{workspace.shown(path)} is not what the tuning records give; run: {WRITE_TABLE}")
    for number, row in enumerate(table.rows, 1):
        try:
            _of_row(workspace, row, _place(workspace, path, number, row))
        except UserError as error:
            wrong.append(str(error))
    return wrong
