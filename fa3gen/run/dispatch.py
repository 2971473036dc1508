"""Which generated module `fa3gen.attention` calls: the first row of a table that fits.

The table is `fa3gen/dispatch.yaml`, written by `fa3gen.records.dispatch_table` and never by hand. A row
says for which dtype, head dims, mask and number of keys it stands, names one module by its stem and its SHA-256, and
holds what was measured there. A workspace of your own has its own table, `dispatch.yaml` beside `specs/`, whose rows
come before those of the package. Where no row fits, a module that was never measured is taken only when there is no
choice: one that fits exactly, or one of the production set (`fwd_*`) among those that do.

Imports neither torch nor cutlass.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from fa3gen.base.errors import Problem, SpecError, UserError
from fa3gen.base.files import sha256
from fa3gen.design.family import Family, mask_text
from fa3gen.design.workspace import Workspace
from fa3gen.spec.model import WINDOW_MAX, CausalMask, DType, Mask, NoMask, OutputDType, Spec, SpecModel, WindowMask
from fa3gen.spec.specfile import Variant
from fa3gen.spec.yamltree import read

FILE_NAME = "dispatch.yaml"
WRITE_TABLE = "fa3gen tune --write-table"
PRODUCTION_PREFIX = "fwd_"
DIGEST_LENGTH = 16  # hex digits of a SHA-256 in a row: enough to tell one file from another, and short enough to read


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
    runner_up_sha256: str | None = Field(default=None, description="First digits, of the measured file.")
    gpu: str

    def told(self, home: Workspace) -> str:
        """`at 1024 keys 455 TFLOP/s; k6_d128 420 (NVIDIA H200)`; of a runner-up that has changed since, no figure."""
        other = "nothing else was measured"
        if self.runner_up is not None:
            file = home.module_path(self.runner_up)
            present = sha256(file)[:DIGEST_LENGTH] if file.is_file() else None
            other = f"{self.runner_up} {self.runner_up_tflops:g}"
            if present is None or present != self.runner_up_sha256:
                other = f"second was {self.runner_up}, of another file than the present one"
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
    out_dtype: OutputDType | None = Field(default=None, description="Of O, where it is not `dtype`.")
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
        return Family(self.dtype, self.head_dim, self.head_dim_v, self.mask, self.out_dtype)

    @property
    def region(self) -> str:
        """`up to 1024 keys` or `any number of keys`."""
        return f"up to {self.seq_k.up_to} keys" if self.seq_k else "any number of keys"


class Table(SpecModel):
    """All rows, in the order in which they are looked at."""

    rows: list[Row]


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
    """The module for a call, and why: a row of the table, or (None) that no row fits and nothing else does.

    `measured` says in words what is known of the row's module and of its runner-up.
    """

    stem: str
    file: Path
    spec: Spec
    source: Path
    row: Row | None
    reason: str
    measured: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The module, its spec in short, and why, in a few lines."""
        spec = self.spec
        how = f"tile {spec.tile.q} x {spec.tile.kv}, loads {spec.load.engine}, schedule {spec.schedule.kind}"
        lines = [f"{self.file}", f"  spec  {self.source}: {Family.of(spec)}; {how}", f"  why   {self.reason}"]
        return "\n".join([*lines, *(f"        {measured}" for measured in self.measured)])


def choose(family: Family, seq_k: int, *, lse: bool, workspace: Workspace) -> Choice:
    """The module that serves a call with `seq_k` keys; `lse`: LSE is wanted too.

    Raises NoKernel when there is none, when several fit and none was measured, and when the module of the row is
    missing or not the file that was measured. Raises UserError for a table that cannot be read.
    """
    for home, path in tables(workspace):
        for number, row in enumerate(read_table(path).rows, 1):
            if not row.serves(family, seq_k):
                continue
            choice = of_row(home, row, place_of_row(home, path, number, row))
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
    own, package = table_path(workspace), workspace.package
    if workspace.root != workspace.bundled and own.is_file():
        yield workspace, own
    yield package, table_path(package)


def table_path(workspace: Workspace) -> Path:
    """Where a workspace's table lies: that of the package's own data is part of the package."""
    if workspace.root == workspace.bundled:
        return Path(__file__).parents[1] / FILE_NAME
    return workspace.root / FILE_NAME


def place_of_row(home: Workspace, path: Path, number: int, row: Row) -> str:
    """`fa3gen/dispatch.yaml, row 3 (bf16, head dim 128, causal, up to 1024 keys)`."""
    return f"{home.shown(path)}, row {number} ({row.family}, {row.region})"


def of_row(home: Workspace, row: Row, place: str) -> Choice:
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
    measured = tuple(measurement.told(home) for measurement in row.measured)
    return Choice(row.module, file, variant.spec, variant.source, row, place, measured)


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
    package = workspace.package
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
            served_dims.setdefault(f"{served.dtypes}, {mask_text(served.mask)}", set()).add(served.dims)
    there = "; ".join(
        f"{what}: {', '.join(sorted(found, key=_natural))}" for what, found in sorted(served_dims.items())
    )
    compiled_in = " (the reach of a window is compiled in)" if isinstance(family.mask, WindowMask) else ""

    def likeness(variant: Variant) -> tuple[bool, ...]:
        other = Family.of(variant.spec)
        same_o, same_mask = other.out_dtype == family.out_dtype, other.mask.kind == family.mask.kind
        return same_o, same_mask, other.head_dim == family.head_dim, variant.stem.startswith(PRODUCTION_PREFIX)

    base = max(variants, key=likeness).source.stem if variants else "k4_2"
    mask = json.dumps(family.mask.model_dump()).replace('"', "")
    dims = f"head_dim: {family.head_dim}"
    if family.head_dim_v != family.head_dim:
        dims += f", head_dim_v: {family.head_dim_v}"
    fields = f"`problem: {{{dims}, dtype: {family.dtype}}}` and `mask: {mask}`"
    if family.out_dtype is not None:
        fields = f"`o: {{dtype: {family.out_dtype}}}`, {fields}"
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
