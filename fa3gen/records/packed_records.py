"""How fast modules for packed sequences were: a record for each cell, which is a family, heads, and a list of lengths.

`generated/evidence/packed/<cell>.json`, such as `bf16_d128_causal_packed_chat16_h32_8.json`, is written by
`fa3gen tune --measure MODULE... --write`, never by hand. The rows of the dispatch table for packed sequences are made
of these files.

Imports neither torch nor cutlass.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fa3gen.base.errors import UserError
from fa3gen.base.files import by_name, sha256, write_text
from fa3gen.base.parts import GrownPart, Part, read_file, rounded
from fa3gen.design.family import Family, PackedShape, PagedShape, heads_text, usual_out_dtype
from fa3gen.design.masks import Window, of_call
from fa3gen.design.tile_order import takes_group
from fa3gen.design.workspace import Workspace
from fa3gen.hardware.chips import H200
from fa3gen.records.tuning_records import MaskShape, Measured
from fa3gen.run.dispatch import MEASURE, seen, tiles_of_packed
from fa3gen.spec.model import AttentionDType, Forward, SequenceLayout, StoredDType, WindowMask
from fa3gen.spec.specfile import Variant

FOLDER = "packed"  # below generated/evidence


class PackedProblem(GrownPart):
    """A family, heads, and the lengths of all sequences: q (sum of lengths_q, heads_q, head_dim)."""

    LATER = frozenset({"page", "sink", "softcap", "kv_dtype"})

    dtype: AttentionDType
    head_dim: int = Field(gt=0)
    head_dim_v: int = Field(gt=0)
    mask: MaskShape
    heads_q: int = Field(gt=0)
    heads_kv: int = Field(gt=0)
    lengths: str = Field(pattern=r"^\w+$", description="What the list of lengths is called.")
    lengths_q: list[int] = Field(min_length=1)
    lengths_k: list[int] = Field(min_length=1)
    page: int | None = Field(default=None, gt=0, description="Keys of a page; none where keys are packed, too.")
    sink: bool = False
    softcap: bool = False
    kv_dtype: StoredDType | None = Field(default=None, description="Of k and v, where they have 8 bits.")

    @classmethod
    def of(cls, family: Family, lengths: str, shape: PackedShape) -> Self:
        """The problem of a family at one shape, whose lengths have a name."""
        return cls(
            dtype=family.dtype,
            head_dim=family.head_dim,
            head_dim_v=family.head_dim_v,
            mask=MaskShape.of(of_call(family.mask, shape.window)),
            heads_q=shape.heads_q,
            heads_kv=shape.heads_kv,
            lengths=lengths,
            lengths_q=list(shape.lengths_q),
            lengths_k=list(shape.lengths_k),
            page=family.page_rows,
            sink=family.sink,
            softcap=family.softcap,
            kv_dtype=family.kv_dtype,
        )

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        if self.heads_q % self.heads_kv:
            raise ValueError(f"heads_q {self.heads_q} is no multiple of heads_kv {self.heads_kv}")
        if len(self.lengths_q) != len(self.lengths_k):
            raise ValueError(f"{len(self.lengths_q)} sequences of queries and {len(self.lengths_k)} of keys")
        return self

    @property
    def family(self) -> Family:
        """What a module has to be compiled for to serve this: any window, where there is one."""
        where: SequenceLayout = "packed" if self.page is None else "paged"
        mask = WindowMask() if self.window else self.mask.spec_mask()
        return Family(
            *(self.dtype, self.head_dim, self.head_dim_v, mask, usual_out_dtype(self.dtype)),
            layout=where,
            sink=self.sink,
            softcap=self.softcap,
            page_rows=self.page,
            kv_dtype=self.kv_dtype,
        )

    @property
    def window(self) -> Window | None:
        """That of the call, where it has one."""
        left, right = self.mask.left, self.mask.right
        return None if left is None or right is None else (left, right)

    @property
    def shape(self) -> PackedShape:
        """The sizes of its call."""
        sizes = tuple(self.lengths_q), tuple(self.lengths_k), self.heads_q, self.heads_kv
        if self.page is None:
            return PackedShape(*sizes, window=self.window)
        return PagedShape(*sizes, window=self.window, page=self.page)

    @property
    def seq_q(self) -> int:
        """Queries of a sequence in the mean."""
        return self.shape.mean.seq_q

    @property
    def seq_k(self) -> int:
        """Keys of a sequence in the mean, of those that a window shows."""
        return seen(self.shape.mean.seq_k, self.window)

    @property
    def tiles(self) -> int:
        """Tiles of queries, as rows count them."""
        heads = self.heads_q, self.heads_kv
        return tiles_of_packed(sum(self.lengths_q), len(self.lengths_q), heads, max(self.lengths_q))

    @property
    def group(self) -> int:
        """Query heads of one head of k and v."""
        return self.heads_q // self.heads_kv

    @property
    def label(self) -> str:
        """Everything in one line: `bf16 d128 causal packed chat16, heads 32/8`; names the file of the record, too."""
        heads = heads_text(self.heads_q, self.heads_kv)
        return f"{self._label.replace('_', ' ')} {self.lengths}, heads {heads}"

    @property
    def file_name(self) -> str:
        """`bf16_d128_causal_packed_chat16_h32_8.json`."""
        return f"{self._label}_{self.lengths}_h{self.heads_q}_{self.heads_kv}.json"

    @property
    def _label(self) -> str:
        return self.family.of_call(self.window).label


class PackedResult(Measured):
    """One module and its speed."""

    tflops: float = Field(gt=0)


class PackedRecord(Part):
    """One cell on one GPU on one day: the modules that were timed in the same run, in a CUDA graph of launches."""

    version: Literal[1] = 1
    gpu: str
    sms: int = Field(default=H200.sms, gt=0)
    date: str = Field(description="UTC day.", pattern=r"^\d{4}-\d{2}-\d{2}$")
    torch: str | None
    dsl: str | None
    problem: PackedProblem
    results: list[PackedResult] = Field(min_length=1)

    @model_validator(mode="after")
    def _of_one_family(self) -> Self:
        stems = [result.stem for result in self.results]
        if len(set(stems)) < len(stems):
            raise ValueError("two results have the same stem")
        for result in self.results:
            if not Family.of(spec := Forward.model_validate(result.spec)).serves(self.problem.family):
                raise ValueError(f"{result.stem} is compiled for another problem")
            if not takes_group(spec, self.problem.group):
                heads, group = spec.tile.pack_heads, self.problem.group
                raise ValueError(f"{result.stem} holds {heads} heads in a tile, and the group has {group}")
        return self

    @property
    def winner(self) -> str:
        """The stem of the fastest module."""
        return max(self.results, key=lambda result: result.tflops).stem

    @property
    def tiles_per_sm(self) -> float:
        """How many tiles there are for each SM of its GPU, as rows count them."""
        return self.problem.tiles / self.sms


def results_of(workspace: Workspace, speeds: Iterable[tuple[Variant[Forward], float]]) -> list[PackedResult]:
    """Results of modules of a workspace, whose files are the ones that ran: their speeds, in TFLOP/s."""
    return [
        PackedResult(
            stem=variant.stem,
            sha256=sha256(workspace.module_path(variant.stem)),
            tflops=rounded(tflops),
            spec=variant.spec.model_dump(mode="json"),
        )
        for variant, tflops in speeds
    ]


def directory(workspace: Workspace) -> Path:
    """Where the records lie; it need not exist yet."""
    return workspace.evidence_dir / FOLDER


def save(workspace: Workspace, records: Iterable[PackedRecord]) -> list[Path]:
    """Write each record into the file of its cell, over one that is there. Returns what was written."""
    written = []
    for record in records:
        path = directory(workspace) / record.problem.file_name
        write_text(path, _text(record))
        written.append(path)
    return written


def _text(record: PackedRecord) -> str:
    """JSON with a line for each fact, each result, and each fact of the problem."""
    fields = {name: json.dumps(value) for name, value in record.model_dump(mode="json").items()}
    fields["problem"] = _lines(record.problem.model_dump(mode="json").items())
    results = [json.dumps(result.model_dump(mode="json"), sort_keys=True) for result in record.results]
    fields["results"] = "[\n    " + ",\n    ".join(results) + "\n  ]"
    return "{\n" + ",\n".join(f'  "{name}": {text}' for name, text in fields.items()) + "\n}\n"


def _lines(facts: Iterable[tuple[str, Any]]) -> str:
    return "{\n    " + ",\n    ".join(f'"{name}": {json.dumps(value)}' for name, value in facts) + "\n  }"


def load_all(workspace: Workspace) -> Sequence[PackedRecord]:
    """Every record of a workspace, in the order of their files' names.

    Raises UserError for a file that is none, or that does not hold what its name says.
    """
    records = []
    for path in by_name(directory(workspace).glob("*.json")):
        record = read_file(
            PackedRecord, path, "a record of a packed cell", f"make it again with {MEASURE} MODULE... --write"
        )
        if record is not None and record.problem.file_name != path.name:
            raise UserError(f"{path} holds the record of {record.problem.label}; rename it {record.problem.file_name}")
        records += [record] if record else []
    return records
