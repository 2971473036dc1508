"""What exists and what is proven: a row per module, with what its spec chooses and what the records say of its file.

Proof comes from records alone, each of them about one exact file, named by its SHA-256:

- a GPU: the records of `fa3gen verify --evidence` (`generated/evidence/<stem>.json`);
- the CPU model of sm_90a: the records of `fa3gen verify --on cpu --evidence` (`generated/evidence/cpu_model`), or else
  the comparison with a GPU (`generated/evidence/comparison`), for which the model has executed the module, too.

Without a record a module is "unverified", whatever was done with it. Imports neither torch nor cutlass.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fa3gen.base import files
from fa3gen.base.errors import UserError
from fa3gen.base.markdown import speed
from fa3gen.base.markdown import table as table_of
from fa3gen.base.wording import counted
from fa3gen.design import boxes, footprint, gemm, ladder
from fa3gen.design.family import Family
from fa3gen.design.workspace import Workspace
from fa3gen.records import evidence
from fa3gen.records.evidence import TIMED, CpuStatus, Status
from fa3gen.spec.model import (
    Combine,
    CooperativeSchedule,
    Copy,
    Forward,
    Gemm,
    Major,
    Product,
    Quantize,
    RegisterHandoff,
    Spec,
    SyncLoad,
    WgmmaProduct,
    WindowMask,
)
from fa3gen.spec.specfile import Variant

DOCUMENT = Path("docs/matrix.md")
REFRESH = "fa3gen refresh"  # where the document is; a workspace need not have it
MAKE = f"fa3gen matrix --markdown > {DOCUMENT}"
COMPARISON = Path("comparison", "cpu_model_vs_gpu.json")  # below the directory of evidence


class State(enum.StrEnum):
    """What a record says of the present file; its value is a word for JSON."""

    PROVEN = "proven"
    FAILED = "failed"
    STALE = "stale"
    NONE = "none"


@dataclass(frozen=True)
class Proof:
    """What the records say of one module on one kind of machine, and in words what a cell shows."""

    state: State
    text: str


@dataclass(frozen=True)
class Row:
    """One module. `features` maps columns to words; `tflops` maps sequence lengths to TFLOP/s on the GPU of `gpu`.

    `timed`: whether records have speeds of such a module.
    """

    stem: str
    source: str
    features: Mapping[str, str]
    gpu: Proof
    cpu: Proof
    tflops: Mapping[str, float] = field(default_factory=dict)
    timed: bool = True


def rows(workspace: Workspace, names: Sequence[str] = (), *, package: bool = True) -> list[Row]:
    """The modules that `names` stand for, or all: the ladder first, then by name.

    `package`: those that it brings, too, and a spec that is broken is left out. Raises UserError for unknown names, for
    records that are none, and without `package` for broken specs.
    """
    if names:
        variants = workspace.select(names)
    else:
        files = workspace.survey()[0] if package else workspace.load_all()
        files.sort(key=lambda file: ladder.ladder_order(file.stem))
        variants = [variant for file in files for variant in file.variants]
    records: dict[Workspace, _Records] = {}
    found = []
    for variant in variants:
        place = workspace.place_of(variant)
        found.append(records.setdefault(place, _Records(place)).row(variant))
    return found


# Features


def features(spec: Spec) -> dict[str, str]:
    """What a spec chooses, in words, by column; each operation has columns of its own."""
    match spec:
        case Forward():
            return _of_forward(spec)
        case Gemm():
            return _of_gemm(spec)
        case Copy():
            return _of_copy(spec)
        case Combine():
            return _of_combine(spec)
        case Quantize():
            return _of_quantize(spec)


def _of_forward(spec: Forward) -> dict[str, str]:
    d, v_dim = spec.problem.head_dim, spec.problem.v_dim
    return {
        "head dim": str(d) if d == v_dim else f"{d}/{v_dim}",
        "dtype": Family.of(spec).dtypes,
        "mask": _mask(spec),
        "tile": f"{spec.tile.q} x {spec.tile.kv}",
        "load": "plain" if isinstance(spec.load, SyncLoad) else f"{spec.load.engine} x {spec.load.kv_stages}",
        "S = Q K^T": _product(spec.qk, a="Q", b="K", major="k"),
        "O = P V": _product(spec.pv, a="P", b="V", major="mn") + ", keys permuted" * footprint.permuted_keys(spec),
        "P through": "registers" if isinstance(spec.handoff, RegisterHandoff) else spec.handoff.through,
        "schedule": _schedule(spec),
        "tiles of queries": (f"persistent, {spec.scheduler}" if footprint.persistent(spec) else "one per CTA"),
        "GQA packing": "" if spec.tile.pack_heads == 1 else f"{spec.tile.pack_heads} heads",
        "LSE": "yes" if spec.outputs.lse else "no",
        "scores": ", ".join(["sinks"] * spec.softmax.sink + ["softcap"] * spec.softmax.softcap),
    }


def _of_copy(spec: Copy) -> dict[str, str]:
    ring = spec.ring
    return {
        "dtype": spec.problem.dtype,
        "tile": " x ".join(map(str, (*spec.box.extents[:-1], spec.problem.row))),
        "box": " x ".join(map(str, spec.box.extents)),
        "swizzle": spec.box.swizzle,
        "wide rows": "folded" if boxes.folded(spec) else f"{boxes.copies(spec)} x",
        "layout": spec.problem.layout,
        "tiles of a CTA": "1" if ring is None else f"in turn, ring of {ring.stages}",
    }


def _of_combine(spec: Combine) -> dict[str, str]:
    return {
        "O": spec.problem.dtype,
        "threads": f"{spec.cta.threads}, {spec.cta.per_sm} CTAs on an SM",
        "parts at once": str(spec.parts.at_once),
        "shares of parts": f"up to {spec.parts.shares}",
    }


def _of_quantize(spec: Quantize) -> dict[str, str]:
    problem, tile = spec.problem, spec.tile
    return {
        "head dim": str(problem.head_dim),
        "x": problem.dtype,
        "out": spec.out_element.name + ", transposed" * problem.transpose + ", keys permuted" * problem.permute_keys,
        "rotated": "yes" if problem.rotate else "no",
        "scale of": f"{tile.rows} rows" if problem.scale == "block" else problem.scale,
        "rows of a tile": str(tile.rows),
        "threads": f"{tile.threads}, {tile.per_sm} CTAs on an SM",
    }


def _of_gemm(spec: Gemm) -> dict[str, str]:
    tile, (a, b) = spec.tile, gemm.majors(spec)
    return {
        "dtype": (
            spec.problem.dtype if spec.d_dtype == spec.problem.dtype else f"{spec.problem.dtype}, D in {spec.d_dtype}"
        ),
        "tile": f"{tile.m} x {tile.n} x {tile.k}",
        "load": f"{spec.load.engine} x {spec.load.stages}",
        "D = A B": spec.product.engine,
        "A": f"{a.upper()}-major, {'registers' if gemm.a_in_registers(spec) else 'smem'}",
        "B": f"{b.upper()}-major",
        "C": "added" if spec.d.add_c else "no",
        "schedule": spec.schedule.kind.replace("_", " ") + ", overlap" * gemm.overlapped(spec),
        "tiles of D": "persistent, static" if gemm.specialized(spec) else "one per CTA",
    }


def _mask(spec: Forward) -> str:
    if isinstance(spec.mask, WindowMask):
        if spec.mask.given:
            return "any window"
        return f"window {spec.mask.left}, {spec.mask.right}"
    return spec.mask.kind


def _product(product: Product, *, a: str, b: str, major: Major) -> str:
    """The engine, and what is not as usual about the form of a WGMMA; `major` is the usual one of B.

    That P comes from registers has a column of its own.
    """
    if not isinstance(product, WgmmaProduct):
        return product.engine
    words = [f"{a} in registers"] * (product.a.source == "registers" and a == "Q")
    words += [f"{a} MN-major"] * (product.a.major == "mn")
    words += [f"{b} {product.b.major.upper()}-major"] * (product.b.major != major)
    return ", ".join([product.engine, *words])


def _schedule(spec: Forward) -> str:
    words = spec.schedule.kind.replace("_", " ")
    if isinstance(spec.schedule, CooperativeSchedule) or not spec.schedule.overlap:
        return words
    return f"{words}, overlap"


# Proof


class _ComparedCase(BaseModel):
    """A part of `fa3gen.verify.comparison`, which imports torch. Wrong elements where O is exact; None elsewhere."""

    gpu_wrong: int | None
    cpu_wrong: int | None


class _ComparedModule(BaseModel):
    stem: str
    source_sha256: str
    cases: list[_ComparedCase]


class _Environment(BaseModel):
    dsl: str | None


class _Comparison(BaseModel):
    date: str
    cpu: _Environment
    modules: list[_ComparedModule]


class _Records:
    """The records of one workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def row(self, variant: Variant) -> Row:
        """One row; a module that was never rendered has no proof."""
        source, words, timed = variant.source.as_posix(), features(variant.spec), isinstance(variant.spec, Forward)
        if not self.workspace.module_path(variant.stem).is_file():
            missing = Proof(State.NONE, "not rendered")
            return Row(variant.stem, source, words, missing, missing, timed=timed)
        gpu, tflops = self._gpu(variant.stem)
        return Row(variant.stem, source, words, gpu, self._cpu(variant.stem), tflops, timed=timed)

    def _gpu(self, stem: str) -> tuple[Proof, Mapping[str, float]]:
        status, record = evidence.status(self.workspace, stem)
        if record is None:
            return Proof(State.NONE, "unverified"), {}
        made = f"{record.gpu.removeprefix('NVIDIA ')}, {record.date}, DSL {record.dsl or '?'}"
        match status:
            case Status.VERIFIED:
                return Proof(State.PROVEN, f"verified on {made}"), record.tflops
            case Status.FAILED:
                return Proof(State.FAILED, f"FAILED on {made}"), {}
            case _:
                return Proof(State.STALE, _stale(record.date)), {}

    def _cpu(self, stem: str) -> Proof:
        status, record = evidence.cpu_status(self.workspace, stem)
        if record is None or status is CpuStatus.STALE:
            stale = "" if record is None else record.date
            return self._compared(stem, stale)
        made = f"on the CPU model, {record.date}, DSL {record.dsl or '?'}"
        if status is CpuStatus.PASSED:
            return Proof(State.PROVEN, f"executed {made}")
        return Proof(State.FAILED, f"FAILED {made}")

    def _compared(self, stem: str, stale: str) -> Proof:
        """What the comparison with a GPU says; `stale` is the day of another record, of an older file."""
        comparison = self._comparison
        module = None if comparison is None else self._modules.get(stem)
        if comparison is None or module is None:
            return Proof(State.STALE, _stale(stale)) if stale else Proof(State.NONE, "no record")
        if files.sha256(self.workspace.module_path(stem)) != module.source_sha256:
            return Proof(State.STALE, _stale(max(stale, comparison.date)))
        made = f"on the CPU model, {comparison.date}, DSL {comparison.cpu.dsl or '?'}"
        if any(case.cpu_wrong for case in module.cases):
            return Proof(State.FAILED, f"WRONG {made}")
        return Proof(State.PROVEN, f"executed {made}")

    @cached_property
    def _comparison(self) -> _Comparison | None:
        path = self.workspace.evidence_dir / COMPARISON
        if not path.is_file():
            return None
        try:
            return _Comparison.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise UserError(
                f"{path} is no comparison of the CPU model with a GPU ({error.errors()[0]['msg']}); restore it with git"
            ) from error

    @cached_property
    def _modules(self) -> dict[str, _ComparedModule]:
        return {module.stem: module for module in self._comparison.modules} if self._comparison else {}


def _stale(date: str) -> str:
    return f"stale: the file changed after {date}"


# Text

_INTRO = f"""# What exists and what is proven

Written by `{REFRESH}` and `fa3gen verify --evidence`; do not edit. One row per generated module. The last
columns come from records, each of which is about one exact file (SHA-256): *GPU* from
`fa3gen verify --evidence` on a Hopper GPU, *CPU model* from `fa3gen verify --on cpu --evidence` or from the comparison
in [cpu_model.md](cpu_model.md). "stale": the record is of an older file. Continuous integration executes every module
on the CPU model, too, but leaves no record. Errors and compile facts are in [EVIDENCE.md](../generated/EVIDENCE.md).
TFLOP/s at 4k and 16k: forward, 16,384 tokens in all, heads x head dim = 2048, {TIMED}.
"""


def columns(row: Row) -> list[str]:
    """The headings of the table that a row is in: one for each operation."""
    return ["module", *row.features, "GPU", "CPU model", *["TFLOP/s 4k", "16k"] * row.timed]


def cells(row: Row) -> list[str]:
    """The cells of a table's row."""
    speeds = [speed(row.tflops.get(str(length))) for length in evidence.SEQ_LENS] if row.timed else []
    return [row.stem, *row.features.values(), row.gpu.text, row.cpu.text, *speeds]


def by_operation(table: Sequence[Row]) -> list[list[Row]]:
    """The rows that share headings, in the order in which the first of them stands."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in table:
        groups.setdefault(tuple(columns(row)), []).append(row)
    return list(groups.values())


def summary(table: Sequence[Row]) -> str:
    """How many modules are proven, failing, stale or without a record, on each kind of machine."""
    parts = [counted(len(table), "module")]
    for where, proofs in (("GPU", [row.gpu for row in table]), ("CPU model", [row.cpu for row in table])):
        counts = Counter(proof.state for proof in proofs)
        words = {
            State.PROVEN: "verified" if where == "GPU" else "executed",
            State.FAILED: "failed",
            State.STALE: "stale",
            State.NONE: "without a record",
        }
        parts.append(f"{where}: " + ", ".join(f"{counts[state]} {words[state]}" for state in State if counts[state]))
    return "; ".join(parts)


def markdown(workspace: Workspace) -> str:
    """The text of docs/matrix.md: the workspace's own modules."""
    table = rows(workspace, package=False)
    lines = [_INTRO, f"{summary(table)}."]
    for group in by_operation(table):
        texts = [[f"`{stem}`", *rest] for stem, *rest in map(cells, group)]
        lines += ["", *table_of(columns(group[0]), texts)]
    return "\n".join(lines) + "\n"


def check(workspace: Workspace) -> str | None:
    """Why docs/matrix.md is not what the records say, and what mends it; None where it is."""
    path = workspace.root / DOCUMENT
    if path.is_file() and path.read_text(encoding="utf-8") == markdown(workspace):
        return None
    if path.is_file():
        return f"{DOCUMENT} is not what specs and records say; run `{REFRESH}`"
    return f"{DOCUMENT} does not exist; run `{MAKE}`"


def document(table: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as JSON values."""
    return [
        {
            "module": row.stem,
            "spec": row.source,
            **row.features,
            "gpu": vars(row.gpu),
            "cpu_model": vars(row.cpu),
            "tflops": dict(row.tflops),
        }
        for row in table
    ]
