"""What was measured when modules were tuned: a list of records per problem family, one record per shape.

`generated/evidence/tuning/<family>.json`, such as `bf16_d128_causal.json`, is written by `fa3gen tune --write`, never
by hand; the dispatch table is made of these files. A record holds the times of every module in every round of one run
of interleaved rounds, in one process on one GPU, from CUDA graphs, eager times beside, the peers that ran with them,
and the winner. The modules are named with the SHA-256 of their files and their whole specs.

Imports neither torch nor cutlass.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from fa3gen.base.errors import UserError
from fa3gen.base.files import by_name, write_text
from fa3gen.base.parts import GrownPart, Part, first_problem, rounded
from fa3gen.design.family import Family, Shape, heads_text
from fa3gen.hardware.chips import H200
from fa3gen.run.dispatch import MEASURE
from fa3gen.spec.model import AttentionDType, CausalMask, Forward, Mask, NoMask, OutputDType, WindowMask

if TYPE_CHECKING:
    from fa3gen.design.workspace import Workspace

FOLDER = "tuning"  # below generated/evidence
_DIGITS_OF_NAME = 12  # of a SHA-256, in the name of a module within a file of records
_AGREEMENT = 2e-3  # between a median, its speed and its rounds, all rounded as `parts.rounded` does


class MaskShape(Part):
    """Which keys a row sees; `left` and `right` are the reach of a window and null for other masks."""

    kind: Literal["none", "causal", "window"]
    left: int | None = Field(default=None, ge=0)
    right: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _reach_of_windows_only(self) -> Self:
        given = (self.left is not None, self.right is not None)
        if given != ((True, True) if self.kind == "window" else (False, False)):
            raise ValueError("a window has left and right, no other mask has either")
        return self

    @classmethod
    def of(cls, mask: Mask) -> "MaskShape":
        """The shape of a spec's mask."""
        if isinstance(mask, WindowMask):
            return cls(kind="window", left=mask.left, right=mask.right)
        return cls(kind=mask.kind)

    def spec_mask(self) -> Mask:
        """The mask as specs have it."""
        if self.left is not None and self.right is not None:
            return WindowMask(left=self.left, right=self.right)
        return CausalMask() if self.kind == "causal" else NoMask()


# Fields of a family by which no module is tuned.
UNTUNED = "layout", "page_rows", "any_cap", "part_keys", "kv_dtype"


def refuse_untuned(family: Family) -> None:
    """Raise UserError for modules that are not tuned, with what to do instead: those for packed sequences, for k and v
    of another dtype than q, for parts of so many keys, and for tensors whose rows are not contiguous, but for a v of 8
    bits, which may have a contiguous sequence."""
    if family.layout != "dense":
        raise UserError(f"modules are tuned for dense tensors, and these are for {family}; measure them with {MEASURE}")
    if family.by_sequence and not family.eight_bits:
        raise UserError(
            f"modules are tuned for tensors with contiguous rows, and these are for {family}; time them with "
            "fa3gen bench"
        )
    if family.kv_dtype is not None:
        raise UserError(
            f"modules are tuned for q, k and v of one dtype, and these are for {family}; time them with fa3gen bench"
        )
    if family.part_keys is not None:
        raise UserError(
            f"modules are tuned where several serve a call, and one alone is for {family}; time it with fa3gen bench"
        )


class TunedProblem(GrownPart):
    """A family and one shape: q (batch, seq_q, heads_q, head_dim), k (batch, seq_k, heads_kv, head_dim)."""

    LATER = frozenset({"out_dtype", "sink", "softcap", "by_sequence", "block_scales", "v_permuted"})

    dtype: AttentionDType
    head_dim: int = Field(gt=0)
    head_dim_v: int = Field(gt=0)
    mask: MaskShape
    batch: int = Field(gt=0)
    heads_q: int = Field(gt=0)
    heads_kv: int = Field(gt=0)
    seq_q: int = Field(gt=0)
    seq_k: int = Field(gt=0)
    out_dtype: OutputDType | None = Field(default=None, description="Of O, where it is not `dtype`.")
    sink: bool = False
    softcap: bool = False
    by_sequence: Literal["v"] | None = Field(
        default=None, description="Of 8 bits, the input whose sequence is contiguous; without it, rows of all are."
    )
    block_scales: bool = False
    v_permuted: bool = Field(default=False, description="Whether that has its keys permuted.")

    @classmethod
    def of(cls, family: Family, shape: Shape) -> Self:
        """The problem of a family at one shape, with the window of a call where calls give one.

        Raises as `refuse_untuned`.
        """
        family = family.of_call(shape.window)
        refuse_untuned(family)
        fields = {name: value for name, value in family._asdict().items() if name not in UNTUNED}
        fields["by_sequence"] = "v" if family.by_sequence else None  # q and k of 8 bits have contiguous rows
        sizes = {name: size for name, size in asdict(shape).items() if name != "window"}
        return cls(**{**fields, "mask": MaskShape.of(family.mask)}, **sizes)

    @model_validator(mode="after")
    def _whole_groups_of_heads(self) -> Self:
        if self.heads_q % self.heads_kv:
            raise ValueError(f"heads_q {self.heads_q} is no multiple of heads_kv {self.heads_kv}")
        return self

    @property
    def family(self) -> Family:
        """What a module has to be compiled for to serve this."""
        return Family(
            *(self.dtype, self.head_dim, self.head_dim_v, self.mask.spec_mask(), self.out_dtype),
            by_sequence=tuple(self.by_sequence or ""),
            sink=self.sink,
            softcap=self.softcap,
            block_scales=self.block_scales,
            v_permuted=self.v_permuted,
        )

    @property
    def group(self) -> int:
        """Query heads of one head of k and v."""
        return self.heads_q // self.heads_kv

    @property
    def shape(self) -> Shape:
        """The sizes of its call."""
        return Shape(self.batch, self.seq_q, self.seq_k, self.heads_q, self.heads_kv)

    @property
    def lengths(self) -> str:
        """`4k`, or `1x16k` where queries and keys differ in number."""
        queries, keys = length_label(self.seq_q), length_label(self.seq_k)
        return keys if self.seq_q == self.seq_k else f"{queries}x{keys}"

    @property
    def label(self) -> str:
        """Everything in one line: `bf16 d128 causal 4k, batch 4, heads 16`."""
        heads = heads_text(self.heads_q, self.heads_kv)
        return f"{self.family.label.replace('_', ' ')} {self.lengths}, batch {self.batch}, heads {heads}"

    @property
    def flops(self) -> float:
        """Of both products, as `fa3gen bench` counts them."""
        return self.family.flops(self.shape)

    def tflops(self, milliseconds: float) -> float:
        """Speed of one launch in TFLOP/s."""
        return self.flops / milliseconds / 1e9


def length_label(length: int) -> str:
    """`4k` for whole multiples of 1024, else the number."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


Milliseconds = list[float]


class _Timed(Part):
    """Rounds and what follows from them."""

    milliseconds: float = Field(gt=0, description="Median of the rounds.")
    tflops: float = Field(gt=0)
    rounds: Milliseconds = Field(
        min_length=1, description="Of one launch in a CUDA graph of many; the rounds were interleaved."
    )
    captured: bool = Field(
        default=True,
        description="False: could not be captured in a CUDA graph, and was launched one by one; older records do not "
        "tell.",
    )
    eager: float | None = Field(
        default=None,
        gt=0,
        description="Milliseconds of one of many calls one after the other, without a graph: the host's time counts. "
        "Null where it was not measured.",
    )
    error: float | None = Field(
        default=None,
        ge=0,
        description="Relative error (Frobenius) of O in the last rows of this very shape, beside attention in float32; "
        "null where nobody wrote it down.",
    )

    @model_validator(mode="after")
    def _median_of_the_rounds(self) -> Self:
        if not math.isclose(self.milliseconds, statistics.median(self.rounds), rel_tol=_AGREEMENT):
            raise ValueError(f"milliseconds is {self.milliseconds}, the median is {statistics.median(self.rounds)}")
        return self


class Measured(GrownPart):
    """One module: its stem, the SHA-256 of its file, and its whole spec.

    That file is the one that ran, or a later one with the same instructions: then `ran` is that of the former.
    """

    LATER = frozenset({"ran"})

    stem: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    ran: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    spec: dict[str, Any]

    def carried(self, later: Mapping[str, str]) -> Self:
        """The result of the later file with the same instructions, where there is one; `later`: SHA-256 to SHA-256."""
        if self.sha256 not in later:
            return self
        return self.model_copy(update={"sha256": later[self.sha256], "ran": self.ran or self.sha256})


class Result(Measured, _Timed):
    """One module and its times."""


class PeerResult(_Timed):
    """A kernel of somebody else, in the same rounds."""

    name: str


class TuningRecord(Part):
    """One shape on one GPU on one day. The winner is one of the results, and what won it is written down."""

    version: Literal[1] = 1
    gpu: str
    sms: int | None = Field(default=None, gt=0, description="Of this GPU; where it was not written down, an H200's.")
    driver: str | None
    torch: str
    dsl: str
    ptxas: str | None = Field(default=None, description="That assembled the modules; null where nobody wrote it down.")
    date: str = Field(description="UTC day.", pattern=r"^\d{4}-\d{2}-\d{2}$")
    problem: TunedProblem
    results: list[Result] = Field(min_length=1)
    peers: list[PeerResult] = []
    absent: dict[str, str] = Field(default={}, description="Who was to run and did not: name -> reason.")
    winner: str

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        stems = [result.stem for result in self.results]
        if len(set(stems)) < len(stems):
            raise ValueError("two results have the same stem")
        if self.winner not in stems:
            raise ValueError(f"the winner {self.winner} is none of the results")
        timed: Sequence[_Timed] = [*self.results, *self.peers]
        if len({len(entry.rounds) for entry in timed}) > 1:
            raise ValueError("results of one record have as many rounds each, since the rounds were interleaved")
        for entry in timed:
            if not math.isclose(entry.tflops, self.problem.tflops(entry.milliseconds), rel_tol=_AGREEMENT):
                raise ValueError(f"{entry.tflops} TFLOP/s do not follow from {entry.milliseconds} ms")
        for result in self.results:
            if not Family.of(Forward.model_validate(result.spec)).serves(self.problem.family):
                raise ValueError(f"{result.stem} is compiled for another problem")
        return self

    @property
    def tiles_per_sm(self) -> float:
        """How many tiles of its shape there are for each SM of its GPU."""
        return self.problem.shape.tiles / (self.sms or H200.sms)

    @property
    def best_peer(self) -> PeerResult | None:
        """The fastest peer, None where none ran."""
        return min(self.peers, key=lambda peer: peer.milliseconds, default=None)

    def result(self, stem: str) -> Result:
        """The result of one module; KeyError for a stem that is not there."""
        return {result.stem: result for result in self.results}[stem]


_RECORDS = TypeAdapter(list[TuningRecord])


def timed(
    problem: TunedProblem,
    rounds: Iterable[float],
    error: float | None = None,
    *,
    eager: float | None = None,
    captured: bool = True,
) -> dict[str, Any]:
    """The fields of a result that were measured or follow from that, rounded as `parts.rounded` does."""
    kept: list[float] = rounded(list(rounds))
    median = statistics.median(kept)
    return {
        "rounds": kept,
        "milliseconds": rounded(median),
        "tflops": rounded(problem.tflops(median)),
        "captured": captured,
        "eager": rounded(eager),
        "error": rounded(error),
    }


def directory(workspace: Workspace) -> Path:
    """Where the files of records lie; it need not exist yet."""
    return workspace.evidence_dir / FOLDER


class _Ran(Part):
    """A file that was measured, or has the instructions of that, `ran`, and its whole spec; each stands once."""

    sha256: str
    spec: dict[str, Any]
    ran: str | None = None


class _Document(Part):
    """A file of records: what ran, by names that results refer to, and the records without what they share."""

    version: Literal[2] = 2
    modules: dict[str, _Ran]
    records: list[dict[str, Any]]

    def whole(self) -> list[dict[str, Any]]:
        """The records with the facts of their modules. Raises KeyError where a result refers to none."""
        return [
            {**record, "results": [self._result(result) for result in record["results"]]} for record in self.records
        ]

    def _result(self, result: dict[str, Any]) -> dict[str, Any]:
        ran = self.modules[result["module"]]
        measured = {name: value for name, value in result.items() if name != "module"}
        return {**measured, "stem": result["module"].split()[0], **ran.model_dump(exclude_defaults=True)}


def dumps(records: Sequence[TuningRecord]) -> str:
    """The JSON text of records: a line for each module and each result, what has its default value left out.

    Where two records hold one file with two specs, which another version of fa3gen can write, the later one stays.
    """
    ran: dict[str, _Ran] = {}
    documents = []
    for record in records:
        document = record.model_dump(exclude_defaults=True)
        for result, short in zip(record.results, document["results"], strict=True):
            name = f"{result.stem} {result.sha256[:_DIGITS_OF_NAME]}"
            ran[name] = _Ran(sha256=result.sha256, spec=result.spec, ran=result.ran)
            short["module"] = name
            for fact in ("stem", "sha256", "spec", "ran"):
                short.pop(fact, None)
        documents.append(document)
    modules = {name: ran[name].model_dump(exclude_defaults=True) for name in sorted(ran)}
    return _text({"version": 2, "modules": modules, "records": documents}) + "\n"


def _text(value: Any, indent: str = "") -> str:
    """JSON that a person can read and diff: `dumps` says where lines end."""
    deeper = indent + "  "
    match value:
        case {"modules": _} | {"winner": _}:
            entries = [f"{json.dumps(name)}: {_text(item, deeper)}" for name, item in value.items()]
        case {**items} if items and all(isinstance(item, dict) and "sha256" in item for item in items.values()):
            entries = [f"{json.dumps(name)}: {_line(item)}" for name, item in items.items()]
        case [{}, *_]:
            entries = [_text(item, deeper) for item in value]
        case _:
            return _line(value)
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{deeper}" + f",\n{deeper}".join(entries) + f"\n{indent}{closing}"


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


def loads(text: str, path: Path) -> list[TuningRecord]:
    """Records from JSON text, also that of older files, which are lists of whole records.

    Raises UserError naming `path` and the place where it is none of what `dumps` writes.
    """
    again = "delete it and run `fa3gen tune` again"
    try:
        return list(_parsed(text))
    except ValidationError as error:
        raise UserError(f"{path} is no list of tuning records ({first_problem(error)}); {again}") from error
    except KeyError as error:
        raise UserError(f"{path} is no list of tuning records (there is no {error}); {again}") from error
    except ValueError as error:
        raise UserError(f"{path} is no list of tuning records ({error}); {again}") from error


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[TuningRecord, ...]:
    """The records of a text, which are frozen: pages read every file several times."""
    found = json.loads(text)
    whole = found if isinstance(found, list) else _Document.model_validate(found).whole()
    return tuple(_RECORDS.validate_python(whole))


def load(path: Path) -> list[TuningRecord]:
    """The records of one file; UserError where they cannot be read, as `loads`."""
    try:
        return loads(path.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}; delete it and run `fa3gen tune` again") from error


def load_all(workspace: Workspace) -> list[TuningRecord]:
    """Every record of a workspace, by family and then by lengths.

    Raises UserError for a file that does not hold what its name says, and for two records of one shape.
    """
    records = []
    for path in by_name(directory(workspace).glob("*.json")):
        found = load(path)
        strangers = {record.problem.family.label for record in found} - {path.stem}
        if strangers:
            raise UserError(f"{path} holds records of {', '.join(sorted(strangers))}; move them to files of that name")
        shapes = [record.problem for record in found]
        if any(shape in shapes[:index] for index, shape in enumerate(shapes)):
            raise UserError(f"{path} holds two records of one shape; delete the older one")
        records += found
    return sorted(records, key=_order)


def save(workspace: Workspace, records: Sequence[TuningRecord]) -> list[Path]:
    """Put records into the files of their families; one of the same shape is replaced. Returns what was written."""
    written = []
    for label in dict.fromkeys(record.problem.family.label for record in records):
        path = directory(workspace) / f"{label}.json"
        fresh = [record for record in records if record.problem.family.label == label]
        shapes = [record.problem for record in fresh]
        kept = [record for record in (load(path) if path.exists() else []) if record.problem not in shapes]
        write_text(path, dumps(sorted([*kept, *fresh], key=_order)))
        written.append(path)
    return written


def _order(record: TuningRecord) -> tuple[Any, ...]:
    problem = record.problem
    return problem.family.label, problem.seq_k, problem.seq_q, problem.batch, problem.heads_q, problem.heads_kv
