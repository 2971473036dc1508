"""How the CPU model of sm_90a differs from a real GPU: the same inputs through both, element by element.

`tests/gpu/compare_cpu_model.py` runs both sides. Here are the inputs, the differences, the record (JSON) and its
rendering in docs/cpu_model.md. Inputs come from NumPy's PCG64 stream and a fixed seed, so that the two sides may run
on different machines; a digest of their bits proves that they were the same.

Bits travel as NumPy arrays: 16-bit O as uint16, LSE and the accumulators of single products as float32.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fa3gen.base import files, markdown
from fa3gen.base.errors import UserError
from fa3gen.base.files import write_text
from fa3gen.base.parts import Part, read_file, rounded
from fa3gen.design import footprint, ladder
from fa3gen.design.family import Family
from fa3gen.design.masks import of_call, reach
from fa3gen.design.operation import operation_of
from fa3gen.hardware.dtypes import DTYPES
from fa3gen.spec.model import Forward, Mask
from fa3gen.verify import reference
from fa3gen.verify.inputs import Case, laid_out, served, usual_keywords

if TYPE_CHECKING:
    from fa3gen.design.workspace import Workspace

SEED = 20_240_711
RECORD = Path("comparison", "cpu_model_vs_gpu.json")  # below the directory of evidence
DOCUMENT = Path("docs/cpu_model.md")
BEGIN, END = "<!-- comparison:begin -->", "<!-- comparison:end -->"
TOOL = "tests/gpu/compare_cpu_model.py"
CODE = 64.0  # size of a query's elements in the selection cases; the keys have 1 and -1
UNDERFLOW = 200.0  # 2^-200 is zero in float32, with a margin
NO_CAP = 1e6  # of scores whose differences count: their largest are thousands


# -- inputs


# Every module runs them on both sides, contiguous and with its own scale.
CASES: tuple[Case, ...] = (
    Case("selection", "each row selects one key of 6 tiles; grouped heads", 1, 40, 333, 2, 1, "selection"),
    Case("selection_few_keys", "more queries than keys: causal rows with no key", 1, 140, 40, 2, 2, "selection"),
    Case("normal", "12 tiles of keys: every ring wraps twice", 1, 40, 717, 1, 1),
    Case("outlier", "a few large rows and channels; two batch entries", 2, 40, 140, 2, 1, "outlier"),
    Case("ramp", "scores that climb along the keys: every tile moves the row maximum", 1, 40, 500, 1, 1, "ramp"),
    Case("few_keys", "whole query tiles with no visible key", 1, 150, 40, 1, 1),
)  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """q, k and v, (batch, seq, heads, d) with a d of its own for v; `selected` (batch, heads_q, seq_q) or None.

    `selected` is the number of the key that a row selects, -1 for a row that sees none. `keywords` are what the module
    has to be given by name: sinks that do nothing, and a cap beyond the scores, where a row selects a key.
    `v_in_order` is v as it was drawn, where the module is given it with its keys permuted.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    selected: torch.Tensor | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)
    v_in_order: torch.Tensor | None = None

    @property
    def values(self) -> torch.Tensor:
        """v with its keys in order."""
        return self.v if self.v_in_order is None else self.v_in_order


def make_inputs(
    case: Case,
    *,
    mask: Mask,
    head_dim: int,
    dtype: torch.dtype,
    v_dim: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Inputs:
    """Draw the tensors of `case`, contiguous and on the CPU; `v_dim` is the head dim of v where it is not `head_dim`,
    `kv_dtype` the dtype of k and v where it is not `dtype`.

    The same arguments give the same bits everywhere.
    """
    kv_dtype = kv_dtype or dtype
    random = np.random.default_rng([SEED, zlib.crc32(case.name.encode()), head_dim])

    def normal(seq: int, heads: int, dim: int = head_dim) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal((case.batch, seq, heads, dim)))

    q, k = normal(case.seq_q, case.heads_q), normal(case.seq_k, case.heads_kv)
    v = normal(case.seq_k, case.heads_kv, head_dim if v_dim is None else v_dim)
    if case.distribution == "selection":
        return _selection(case, random, v.to(kv_dtype), head_dim, mask, dtype)
    if case.distribution == "outlier":
        channels = random.permutation(head_dim)[:2]
        q[..., channels] *= 4
        k[..., channels] *= 4
        rows = random.permutation(case.seq_k)[:4]
        k[:, rows] *= 4
        v[:, rows] *= 16
    elif case.distribution == "ramp":
        q[..., 0] = 4
        k[..., 0] = torch.linspace(0, 20, case.seq_k, dtype=torch.float64)[:, None] * math.sqrt(head_dim) / 4
    return Inputs(q.to(dtype), k.to(kv_dtype), v.to(kv_dtype))


def make_for(spec: Forward, case: Case) -> Inputs:
    """Draw the tensors of `case` as the module of `spec` takes them. UserError where those are not dense."""
    if spec.problem.layout != "dense":
        raise UserError(
            "the comparison of GPU and CPU model draws dense tensors only, and this spec takes packed sequences; "
            "leave its modules out, fa3gen verify runs them on both"
        )
    operation = operation_of(spec)
    q, k, v = (operation.tensor(name) for name in ("q", "k", "v"))
    dims = {"head_dim": q.row, "v_dim": v.row}
    made = make_inputs(case, mask=of_call(spec.mask), dtype=q.dtype.in_torch(), kv_dtype=k.dtype.in_torch(), **dims)
    keywords = usual_keywords(Family.of(spec).keywords, case.heads_q, made.q.device)
    if made.selected is not None and spec.softmax.softcap and not Family.of(spec).any_cap:
        made = replace(made, selected=None)  # no cap that it takes leaves the scores apart
    if made.selected is not None:
        none = {"sinks": torch.full((case.heads_q,), -math.inf), "softcap": NO_CAP}
        keywords = {name: none[name] for name in keywords}
    placed = {"q": laid_out(q, made.q), "k": laid_out(k, made.k), "v": laid_out(v, made.v)}
    return replace(made, **placed, keywords=keywords, v_in_order=made.v if footprint.permuted_keys(spec) else None)


def _selection(
    case: Case, random: np.random.Generator, v: torch.Tensor, head_dim: int, mask: Mask, dtype: torch.dtype
) -> Inputs:
    """Queries that are CODE times one visible key of 1 and -1: every other weight of the row underflows to zero.

    All scores are integers that float32 holds exactly, so O is the selected row of v bit for bit, whatever the order
    of additions. A quarter of the rows selects the first or the last visible key.
    """
    batch, seq_k, heads_kv, _ = v.shape
    codes = torch.from_numpy(random.integers(0, 2, (batch, seq_k, heads_kv, head_dim)) * 2.0 - 1.0)
    products = torch.einsum("bkhd,blhd->bhkl", codes, codes) - 2.0 * head_dim * torch.eye(seq_k)
    margin = CODE * (head_dim - products.max().item()) / math.sqrt(head_dim) * math.log2(math.e)
    assert margin > UNDERFLOW, f"two keys of {case.name} are too much alike: 2^-{margin:.0f} is not surely zero"
    rows = torch.arange(case.seq_q)
    seen = reference.visible_keys(reach(mask), seq_q=case.seq_q, seq_k=seq_k, rows=rows)
    visible = np.ones((case.seq_q, seq_k), bool) if seen is None else seen.numpy()
    selected = np.full((batch, case.heads_q, case.seq_q), -1)
    for index in np.ndindex(*selected.shape):
        keys = np.flatnonzero(visible[index[-1]])
        if len(keys):
            selected[index] = {0: keys[0], 1: keys[-1]}.get(index[-1] % 8, random.choice(keys))
    chosen = torch.from_numpy(selected)
    q = CODE * _rows_of(codes, chosen.clamp(min=0))
    return Inputs(q.to(dtype), codes.to(v.dtype), torch.where(v == 0, torch.ones_like(v), v), chosen)


def _rows_of(kv: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Rows (batch, seq_q, heads_q, d) of kv (batch, seq_k, heads_kv, d) by their numbers (batch, heads_q, seq_q)."""
    heads_q, heads_kv, dim = numbers.shape[1], kv.shape[2], kv.shape[3]
    kv = kv.float() if kv.element_size() == 1 else kv  # torch has no gather of 8 bits
    by_head = kv.repeat_interleave(heads_q // heads_kv, dim=2).transpose(1, 2)  # (batch, heads_q, seq_k, d)
    return by_head.gather(2, numbers[..., None].expand(-1, -1, -1, dim)).transpose(1, 2).contiguous()


def selected_output(inputs: Inputs) -> torch.Tensor:
    """The exact O of a selection case: rows of v, zero where a row sees no key."""
    assert inputs.selected is not None
    rows = _rows_of(inputs.values, inputs.selected.clamp(min=0))
    unseen = (inputs.selected < 0).transpose(1, 2)[..., None]
    return torch.where(unseen, torch.zeros_like(rows), rows)


def bits_of(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor's elements as NumPy has them: float32 as it is, smaller types as unsigned integers."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.element_size() == 2:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    if tensor.element_size() == 1:
        return tensor.view(torch.uint8).numpy()
    return tensor.numpy()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 of the tensors' bits, one after the other."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(np.ascontiguousarray(bits_of(tensor)).tobytes())
    return state.hexdigest()


# -- the record


class Side(Part):
    """What ran one side. None where it could not be read; a GPU and a driver only on the GPU's side."""

    gpu: str | None
    driver: str | None
    cuda_driver: str | None
    torch: str | None
    dsl: str | None
    ptxas: str | None
    python: str


class Difference(Part):
    """Two arrays of the same shape. Maxima are over elements that are finite on both sides.

    `different` counts elements with other bits, `other_kind` those where one side has a NaN, an infinity of its sign
    or a zero and the other has not. `max_ulps` is in units of the last place of the larger of the two (0 where the
    arrays have no format of their own), `max_relative` is |a - b| / max(1, |b|).
    """

    elements: int
    different: int
    other_kind: int
    max_abs: float
    max_ulps: float
    max_relative: float


class CaseResult(Part):
    """One module on one case. `gpu_wrong` and `cpu_wrong` count elements of O that are not the selected row's bits.

    They are None except in selection cases; the errors are maxima of |O - float64 attention|, None where O has a NaN.
    """

    name: str
    shape: str
    o: Difference
    lse: Difference | None
    gpu_error: float | None
    cpu_error: float | None
    gpu_wrong: int | None
    cpu_wrong: int | None


class ModuleResult(Part):
    """One module on all cases."""

    stem: str
    source_sha256: str
    cases: list[CaseResult]


class ProductResult(Part):
    """One product of tests/gpu/wgmma_probe.py: D = A B^T, float32 accumulators before any rounding.

    `operands` is "normal" or "special" (infinities, NaN, subnormal numbers); errors are against float64, over elements
    that are finite there, as is `largest`, the largest |D|. `types` and `shape` are those of the instruction, and
    `depth` is what all of them together sum over.
    """

    name: str
    operands: str
    types: str
    shape: str
    depth: int
    a_layout: str
    b_layout: str
    d: Difference
    gpu_error: float
    cpu_error: float
    largest: float


class CopyResult(Part):
    """One TMA load and store of tests/gpu/tma_probe.py; coordinates and extents with the contiguous dimension first.

    Differences count bytes: of the box as it lies in shared memory, and of the whole tensor that it is stored to.
    """

    name: str
    swizzle: int
    extents: list[int]
    box: list[int]
    load_at: list[int]
    store_at: list[int]
    bytes: int
    shared_different: int
    stored_different: int


class Comparison(Part):
    """Everything that was compared, in one run of each side."""

    version: Literal[1] = 1
    date: str
    seed: int
    gpu: Side
    cpu: Side
    modules: list[ModuleResult]
    products: list[ProductResult]
    copies: list[CopyResult]


# -- differences


def as_float(values: NDArray[Any], format: str) -> NDArray[np.float64]:
    """Numbers of an array of bits: `bf16` or `fp16` in uint16, or `fp32` as it is."""
    if format == "bf16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return (values.view(np.float16) if format == "fp16" else values).astype(np.float64)


def _kinds(values: NDArray[np.float64]) -> NDArray[np.int64]:
    kinds = np.select([np.isnan(values), np.isposinf(values), np.isneginf(values), values == 0], [1, 2, 3, 4], 0)
    return np.asarray(kinds, np.int64)


def difference(gpu: NDArray[Any], cpu: NDArray[Any], format: str) -> Difference:
    """Compare two arrays of one format: `bf16`, `fp16` (bits in uint16) or `fp32`.

    Raises UserError where they have not the same shape and type.
    """
    if gpu.shape != cpu.shape or gpu.dtype != cpu.dtype:
        raise UserError(f"the GPU gave {gpu.dtype} {gpu.shape}, the CPU {cpu.dtype} {cpu.shape}; run both sides again")
    a, b = as_float(gpu, format), as_float(cpu, format)
    integers = f"u{gpu.itemsize}"
    finite = np.isfinite(a) & np.isfinite(b)
    distance = np.abs(a[finite] - b[finite])
    larger = np.maximum(np.abs(a[finite]), np.abs(b[finite]))
    ulps = distance / _ulp(larger, format)
    return Difference(
        elements=gpu.size,
        different=int((gpu.view(integers) != cpu.view(integers)).sum()),
        other_kind=int((_kinds(a) != _kinds(b)).sum()),
        max_abs=float(distance.max(initial=0.0)),
        max_ulps=float(ulps.max(initial=0.0)),
        max_relative=float((distance / np.maximum(1.0, np.abs(b[finite]))).max(initial=0.0)),
    )


def _ulp(values: NDArray[np.float64], format: str) -> NDArray[np.float64]:
    """Distance from each value to the next larger one of the format."""
    facts = torch.finfo(DTYPES[format].in_torch())
    exponent = np.maximum(np.frexp(values)[1], np.frexp(facts.tiny)[1]) - 1
    return np.asarray(np.ldexp(facts.eps, exponent))


def compare_case(
    case: Case, spec: Forward, gpu: Mapping[str, NDArray[Any]], cpu: Mapping[str, NDArray[Any]]
) -> CaseResult:
    """Compare what the two sides gave for one case: `out` and, where the module has it, `lse`."""
    case, format = served(case, spec), spec.o_dtype
    inputs = make_for(spec, case)
    seen = reach(of_call(spec.mask))
    exact = reference.attention(inputs.q, inputs.k, inputs.values, reach=seen, **inputs.keywords).out.numpy()
    wrong: dict[str, int | None] = {"gpu": None, "cpu": None}
    if inputs.selected is not None:
        expected = selected_output(inputs).double().numpy()
        # By value and not by bits: the zero of a row without a key may have either sign.
        wrong = {
            name: int((as_float(side["out"], format) != expected).sum()) for name, side in (("gpu", gpu), ("cpu", cpu))
        }
    return CaseResult(
        name=case.name,
        shape=case.shape,
        o=difference(gpu["out"], cpu["out"], format),
        lse=difference(gpu["lse"], cpu["lse"], "fp32") if spec.outputs.lse else None,
        gpu_error=_largest(as_float(gpu["out"], format) - exact),
        cpu_error=_largest(as_float(cpu["out"], format) - exact),
        gpu_wrong=wrong["gpu"],
        cpu_wrong=wrong["cpu"],
    )


def _largest(values: NDArray[np.float64]) -> float | None:
    """The largest magnitude; None where there is a NaN or an infinity."""
    return float(np.abs(values).max(initial=0.0)) if np.isfinite(values).all() else None


def product_errors(
    gpu: NDArray[np.float32], cpu: NDArray[np.float32], a: torch.Tensor, b: torch.Tensor
) -> tuple[float, float, float]:
    """Largest error of the GPU and of the CPU against A B^T in float64, and the largest element of that."""
    exact = np.einsum("mk,nk->mn", a.double().numpy(), b.double().numpy())
    finite = np.isfinite(exact) & np.isfinite(gpu) & np.isfinite(cpu)
    on_gpu, on_cpu, largest = (
        float(np.abs(values).max(initial=0.0))
        for values in (gpu[finite] - exact[finite], cpu[finite] - exact[finite], exact[finite])
    )
    return on_gpu, on_cpu, largest


# -- the record as a file


def record_path(workspace: Workspace) -> Path:
    """Where the record lies."""
    return workspace.evidence_dir / RECORD


def write(workspace: Workspace, comparison: Comparison) -> Path:
    """Write the record; return its path."""
    path = record_path(workspace)
    data = json.loads(comparison.model_dump_json())
    write_text(path, json.dumps(rounded(data), indent=1, sort_keys=True, allow_nan=False) + "\n")
    return path


def read(workspace: Workspace) -> Comparison | None:
    """Read the record; None when there is none, UserError when the file is not one."""
    way_out = f"make it again with {TOOL} on a Hopper GPU"
    return read_file(Comparison, record_path(workspace), "a comparison", way_out)


def current(workspace: Workspace, comparison: Comparison) -> dict[str, ModuleResult | None]:
    """The result of every stem of attention, None where the module was not compared as it stands now."""
    results = {result.stem: result for result in comparison.modules}
    found: dict[str, ModuleResult | None] = {}
    for stem in ladder.attention_stems(workspace):
        result, path = results.get(stem), workspace.module_path(stem)
        same = result is not None and path.exists() and files.sha256(path) == result.source_sha256
        found[stem] = result if same else None
    return found


# -- the document


def render(workspace: Workspace, comparison: Comparison) -> str:
    """The generated part of docs/cpu_model.md: what was compared, then every number."""
    found = {stem: result for stem, result in current(workspace, comparison).items() if is_dense(workspace, stem)}
    fresh = [result for result in found.values() if result is not None]
    stale = [stem for stem, result in found.items() if result is None]
    lines = [
        f"Written by `{TOOL} compare`; do not edit. A module's row counts only for the exact file that was compared "
        "(SHA-256).",
        "",
        *_sides(comparison),
        "",
        f"{len(fresh)} of {len(found)} modules of attention to dense tensors were compared as they stand now."
        + ("" if not stale else f" Not, or not since they changed: {', '.join(f'`{stem}`' for stem in stale)}."),
        "",
        "### Modules",
        "",
        *_summary(fresh),
        "",
        *_module_table(fresh),
        "",
        "### Single WGMMA products",
        "",
        *_product_text(comparison.products),
        "",
        *_product_table(comparison.products),
        "",
        "### TMA copies",
        "",
        *_copy_text(comparison.copies),
        "",
        *_copy_table(comparison.copies),
    ]
    return "\n".join(lines) + "\n"


def is_dense(workspace: Workspace, stem: str) -> bool:
    """Whether the module is one of attention to dense tensors, which alone are drawn here."""
    (variant,) = workspace.resolve(stem)
    return isinstance(variant.spec, Forward) and variant.spec.problem.layout == "dense"


def _sides(comparison: Comparison) -> list[str]:
    gpu, cpu = comparison.gpu, comparison.cpu
    return [
        f"- GPU: {gpu.gpu}, driver {gpu.driver} (CUDA {gpu.cuda_driver}), DSL {gpu.dsl}, ptxas {gpu.ptxas}, "
        f"torch {gpu.torch}, Python {gpu.python}",
        f"- CPU model of sm_90a: DSL {cpu.dsl}, torch {cpu.torch}, Python {cpu.python}",
        f"- {comparison.date}, seed {comparison.seed}; digests of the inputs were equal on both sides",
    ]


def _summary(modules: Sequence[ModuleResult]) -> list[str]:
    """The largest differences over all modules, in words."""
    cases = [case for module in modules for case in module.cases]
    if not cases:
        return ["Nothing was compared."]
    selections = [case for case in cases if case.gpu_wrong is not None]
    elements = sum(case.o.elements for case in selections)
    wrong_gpu, wrong_cpu = sum(case.gpu_wrong or 0 for case in selections), sum(
        case.cpu_wrong or 0 for case in selections
    )
    lse = [case.lse for case in cases if case.lse is not None]
    others = [case for case in cases if case.gpu_wrong is None]
    share = sum(case.o.different for case in others) / max(1, sum(case.o.elements for case in others))
    return [
        f"- Data movement: of {elements:,} elements of O that have to be one row of V bit for bit, {wrong_gpu} are not "
        f"on the GPU and {wrong_cpu} are not on the CPU.",
        f"- O elsewhere: {share:.2%} of the elements have other bits, by at most "
        f"{max((case.o.max_ulps for case in others), default=0.0):.3g} units in the last place (of float32 where O is "
        f"float32: many, near zero) and {max((case.o.max_abs for case in others), default=0.0):.2g}.",
        f"- LSE: at most {max((part.max_abs for part in lse), default=0.0):.1e}, relative "
        f"{max((part.max_relative for part in lse), default=0.0):.1e}.",
        f"- NaN, infinities and zeros on one side only: {sum(case.o.other_kind for case in cases)} in O, "
        f"{sum(part.other_kind for part in lse)} in LSE.",
    ]


def _module_table(modules: Sequence[ModuleResult]) -> list[str]:
    columns = (
        "module",
        "selection wrong GPU/CPU",
        "O differs",
        "max ulp",
        "max",
        "error GPU",
        "error CPU",
        "LSE max",
        "LSE relative",
    )
    return markdown.table(columns, (_module_row(module) for module in modules))


def _module_row(module: ModuleResult) -> list[str]:
    selections = [case for case in module.cases if case.gpu_wrong is not None]
    others = [case for case in module.cases if case.gpu_wrong is None]
    lse = [case.lse for case in module.cases if case.lse is not None]
    different = sum(case.o.different for case in others) / max(1, sum(case.o.elements for case in others))
    return [
        f"`{module.stem}`",
        f"{sum(case.gpu_wrong or 0 for case in selections)}/{sum(case.cpu_wrong or 0 for case in selections)}",
        f"{different:.2%}",
        f"{max((case.o.max_ulps for case in others), default=0.0):.3g}",
        f"{max((case.o.max_abs for case in others), default=0.0):.1e}",
        _worst(case.gpu_error for case in others),
        _worst(case.cpu_error for case in others),
        f"{max(part.max_abs for part in lse):.1e}" if lse else "no LSE",
        f"{max(part.max_relative for part in lse):.1e}" if lse else "",
    ]


def _worst(errors: Iterable[float | None]) -> str:
    known = list(errors)
    return "NaN" if None in known else f"{max((error for error in known if error is not None), default=0.0):.1e}"


def _product_text(products: Sequence[ProductResult]) -> list[str]:
    lines = []
    for kind in dict.fromkeys(product.types for product in products):
        normal = [product for product in products if product.types == kind and product.operands == "normal"]
        if normal:
            share = sum(product.d.different for product in normal) / sum(product.d.elements for product in normal)
            lines.append(
                f"- `{kind}`, {len(normal)} products: at most {max(product.d.max_abs for product in normal):.1e} apart "
                f"where |D| goes up to {max(product.largest for product in normal):.0f}; {share:.1%} of the elements "
                f"have other bits; error against float64: GPU {max(product.gpu_error for product in normal):.1e}, "
                f"CPU {max(product.cpu_error for product in normal):.1e}."
            )
    special = [product for product in products if product.operands == "special"]
    kinds = sum(product.d.other_kind for product in special)
    elements = sum(product.d.elements for product in special)
    lines.append(
        f"- Infinities, NaN and subnormal operands: of {elements:,} elements, {kinds} are a NaN, an infinity or a zero "
        "on one side only."
    )
    return lines


def _product_table(products: Sequence[ProductResult]) -> list[str]:
    columns = (
        "instruction",
        "sum over",
        "A",
        "B",
        "operands",
        "bits differ",
        "other kind",
        "max",
        "largest",
        "error GPU",
        "error CPU",
    )
    return markdown.table(
        columns,
        (
            [
                f"`{product.shape}.{product.types}`",
                str(product.depth),
                product.a_layout,
                product.b_layout,
                product.operands,
                f"{product.d.different / product.d.elements:.1%}",
                str(product.d.other_kind),
                f"{product.d.max_abs:.1e}",
                f"{product.largest:.3g}",
                f"{product.gpu_error:.1e}",
                f"{product.cpu_error:.1e}",
            ]
            for product in products
        ),
    )


def _copy_text(copies: Sequence[CopyResult]) -> list[str]:
    moved = sum(copy.bytes for copy in copies)
    shared, stored = sum(copy.shared_different for copy in copies), sum(copy.stored_different for copy in copies)
    return [
        f"{len(copies)} boxes of ranks 1 to 5, {moved:,} bytes, inside the tensor and partly before and past its ends: "
        f"{shared} bytes differ as they lie in shared memory, {stored} in the tensors that the boxes were stored to."
    ]


def _copy_table(copies: Sequence[CopyResult]) -> list[str]:
    columns = (
        "copy",
        "swizzle",
        "tensor",
        "box",
        "loaded at",
        "stored at",
        "bytes",
        "differ in shared memory",
        "differ stored",
    )
    return markdown.table(
        columns,
        (
            [
                f"`{copy.name}`",
                str(copy.swizzle),
                *(_listed(values) for values in (copy.extents, copy.box, copy.load_at, copy.store_at)),
                str(copy.bytes),
                str(copy.shared_different),
                str(copy.stored_different),
            ]
            for copy in copies
        ),
    )


def _listed(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values)


def with_comparison(document: str, text: str) -> str:
    """The document with `text` between its markers. Raises UserError when the markers are not there."""
    return markdown.between(document, str(DOCUMENT), BEGIN, text, END)


def page(workspace: Workspace) -> str:
    """The document as the record renders it. Raises UserError without a record."""
    comparison = read(workspace)
    if comparison is None:
        raise UserError(f"there is no {record_path(workspace)}; make it with {TOOL} on a Hopper GPU")
    text = (workspace.root / DOCUMENT).read_text(encoding="utf-8")
    return with_comparison(text, render(workspace, comparison))
