"""A spec for what no spec computes: a near one extended, with the fields that are to be others and no more.

It is what somebody would write who wants a kernel for another head dim, dtype, mask or layout: `extends` a spec that
was tuned for something like it, say what is to be computed, and change how where the rules ask for that. Nothing of
it was measured.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fa3gen.design import footprint
from fa3gen.design.family import Family, usual_out_dtype
from fa3gen.design.masks import computes
from fa3gen.design.nearest import Changes, nearest_legal, with_changes
from fa3gen.design.own_bits import own_bits, shared
from fa3gen.design.rules import Violation, check
from fa3gen.design.workspace import Workspace
from fa3gen.spec.complaints import UNIONS
from fa3gen.spec.model import Forward, Split, SyncLoad, TmaLoad, WgmmaProduct, WindowMask
from fa3gen.spec.specfile import SpecFile, Variant, attention_among
from fa3gen.spec.yamltree import Node, dumps, merge

MOST_BASES = 12  # that are tried, the nearest first
MOST_SPECS_OF_BASE = 300  # looked at for each of them

# How products see q, k and v: product, operand, its major where the head dim is contiguous, and where the sequence is.
_OPERANDS = {"q": ("qk", "a", "k", "mn"), "k": ("qk", "b", "k", "mn"), "v": ("pv", "b", "mn", "k")}
# What follows from a head dim or a dtype, and costs next to nothing; all else is how the base was tuned.
_CHEAP = ("smem.q", "smem.k", "smem.v", "smem.vt", "outputs.o")
USUAL_ROOM = 16  # query heads of a kv head in a tile, where keys are split
PAGE_BOXES = (16, 8)  # keys in boxes that tiles of keys are whole numbers of, as a rule
PROMOTED = {"promote_every": 1}  # P V of tiles of keys is added up in float32
# What says what is computed, and not how.
_ASKED = ("problem", "mask", "o.dtype", "kv.dtype", "softmax.sink", "softmax.softcap")


@dataclass(frozen=True)
class Proposal:
    """A spec file that nobody has written yet: its stem, which its one module has as well, its text and its spec."""

    stem: str
    text: str
    base: str
    spec: Forward


@functools.lru_cache(maxsize=64)
def propose(
    family: Family, workspace: Workspace, *, own: bool = False, parts: bool = False, group: int = 1
) -> Proposal | tuple[Violation, ...]:
    """The spec of a module that serves a family, with LSE and any number of heads; or what is against there being one.

    `own`: one in which a row's bits are its own. `parts`: one that splits keys, in as many parts as a call asks for.
    Its tiles, and those of fixed parts, have room for `group` query heads of a kv head.

    A window is an argument of each call, so that one module serves all of them. Of the nearest specs, it is the one of
    which most can stay as it was tuned. Specs are read once for each family and workspace.
    """
    files, _ = workspace.survey()
    split = _split_of(family, parts=parts)
    bases = [(variant, file) for file in files for variant in attention_among(file.variants)]
    bases.sort(key=lambda base: _distance(base[0], family, split))
    best: tuple[int, Forward, SpecFile] | None = None
    objections: tuple[Violation, ...] = ()
    for variant, file in bases[:MOST_BASES]:
        spec = _asked_of(variant.spec, family, own=own, split=split, group=group)
        if spec is None:
            continue
        objections = objections or _objections(spec)
        changes = nearest_legal(spec, keeps=functools.partial(_is_as_good, spec), most=MOST_SPECS_OF_BASE)
        if changes is None:
            continue
        cost = sum(path not in _CHEAP for path, _ in changes)
        if best is None or cost < best[0]:
            best = cost, with_changes(spec, changes), file
        if cost == 0:
            break
    if best is None:
        return objections
    _, spec, file = best
    how = "_own_bits" * own + "_split" * parts
    if split is not None and spec.tile.pack_heads > USUAL_ROOM:
        how += f"_pack{spec.tile.pack_heads}"
    return Proposal(f"made_{Family.of(spec).label}{how}", _text(spec, file), file.stem, spec)


def _split_of(family: Family, *, parts: bool) -> Split | None:
    """How a module is to split keys; None where nobody asks for that."""
    if family.part_keys is not None:
        return Split(keys=family.part_keys)
    return Split(count="auto") if parts else None


def _kind_of_split(split: Split | None) -> str:
    """Whether parts are as many or as long as something says; specs that differ in it have little in common."""
    return "whole" if split is None else "count" if split.keys is None else "keys"


def _distance(variant: Variant[Forward], family: Family, split: Split | None) -> tuple[Any, ...]:
    """How far a spec is from one for the family: what is hardest to change comes first."""
    spec, other = variant.spec, Family.of(variant.spec)
    alone = spec.scheduler in ("single_tile", "grid")  # a CTA for each tile: for few tiles, or to be read
    dims = (other.head_dim, family.head_dim), (other.head_dim_v, family.head_dim_v)
    return (
        other.eight_bits != family.eight_bits,
        (other.kv_dtype is None) != (family.kv_dtype is None),
        other.block_scales != family.block_scales,
        footprint.by_warps(spec),  # of few heads, masks and dims; what converts for warpgroups serves any
        (footprint.promote_every(spec) == 1) != family.two_levels,
        *(_kind_of_split(spec.split) != _kind_of_split(split), spec.softmax.restart_every is not None),
        *(other.by_sequence != family.by_sequence, other.layout != family.layout),
        other.v_permuted != family.v_permuted,
        *(spec.schedule.kind == "cooperative", alone),
        (family.page_rows or 0) % (other.page_rows or 1) != 0,  # single rows have stages and registers of their own
        other.mask.kind != family.mask.kind,
        # A tile for a larger head dim has room for this one; one for a smaller head dim may not.
        *(own < wanted for own, wanted in dims),
        *(abs(own - wanted) for own, wanted in dims),
        not computes(other.mask, family.mask),
        *(other.keywords != family.keywords, other.out_dtype != family.out_dtype, other.dtype != family.dtype),
        *(spec.tile.pack_heads, spec.tile.ctas_per_sm, -spec.tile.q * spec.tile.kv, variant.stem),
    )


def _asked_of(base: Forward, family: Family, *, own: bool, split: Split | None, group: int) -> Forward | None:
    """The base with what the family computes, legal or not; None where its fields cannot say so."""
    usual = family.out_dtype == usual_out_dtype(family.dtype)
    mask = WindowMask() if isinstance(family.mask, WindowMask) else family.mask
    changes: Changes = (
        ("problem.head_dim", family.head_dim),
        ("problem.head_dim_v", None if family.head_dim_v == family.head_dim else family.head_dim_v),
        *(("problem.dtype", family.dtype), ("problem.layout", family.layout)),
        ("problem.scales", "block" if family.block_scales else "head"),
        ("problem.v_keys", "permuted" if family.v_permuted else "in_order"),
        ("mask", mask.model_dump(exclude_none=True)),
        *(("o.dtype", None if usual else family.out_dtype), ("kv.dtype", family.kv_dtype)),
        ("accumulate", PROMOTED if family.two_levels else None),
        *(("softmax.sink", family.sink), ("softmax.softcap", family.softcap), ("softmax.restart_every", None)),
        ("softmax.row_max", base.softmax.row_max if _bounds_scores(family) else "online"),
        *(("outputs.lse", True), *_heads_and_parts(base, split, group)),
        *((("tile.kv_from", "window"),) if isinstance(mask, WindowMask) and split is not None else ()),
        # Products of 8 bits leave no registers for a cap beside exponentials that are held back: ptxas spills.
        *((("softmax.exp_before_wait", None),) if family.softcap and family.eight_bits else ()),
        *((one.field, one.instead) for one in shared(base) if own),
    )
    if isinstance(base.load, TmaLoad):
        changes += (("load.page_rows", _page_rows(base, family)),)
    transposed = base.smem is not None and family.eight_bits and "v" not in family.by_sequence
    if base.smem is not None:
        changes += (("smem.vt", (base.smem.vt or "128B") if transposed else None),)
    for name, (product, operand, by_head_dim, by_sequence) in _OPERANDS.items():
        if isinstance(getattr(base, product), WgmmaProduct):
            # The product reads V transposed as if its sequence were contiguous.
            across = name in family.by_sequence or (name == "v" and transposed)
            changes += ((f"{product}.{operand}.major", by_sequence if across else by_head_dim),)
    try:
        spec = with_changes(base, changes)
    except ValidationError:
        return None
    return spec if Family.of(spec).serves(family) else None


def _heads_and_parts(base: Forward, split: Split | None, group: int) -> Changes:
    """A tile for each head; or, where keys are split, with room for all heads of a group, as many as a power of two."""
    if split is None:
        return (("tile.pack_heads", 1),)
    room = max(base.tile.pack_heads, 1 << (group - 1).bit_length())
    return ("split", split.model_dump(exclude_none=True)), ("tile.group", "at_most"), ("tile.pack_heads", room)


def _bounds_scores(family: Family) -> bool:
    """Whether exponentials may be relative to a first maximum: `row_max: first`."""
    return family.softcap and not family.any_cap and not family.sink and family.dtype == "bf16"


def _page_rows(base: Forward, family: Family) -> int | None:
    """Keys to copy at once of pages of the family's size: as many as for the base, or for all tiles, or single rows."""
    if family.page_rows is None:
        return None
    usual = Family.of(base).page_rows or (PAGE_BOXES[0] if family.eight_bits else 1)  # of 8-bit queries in boxes
    return next(rows for rows in (usual, *PAGE_BOXES, 1) if family.page_rows % rows == 0)


def _is_as_good(wanted: Forward, spec: Forward) -> bool:
    """Whether a spec computes the same, serves the same calls, and loads ahead where the wanted one does."""
    same = Family.of(spec) == Family.of(wanted) and spec.outputs.lse
    same = same and (spec.tile.pack_heads, spec.split) == (wanted.tile.pack_heads, wanted.split)
    same = same and own_bits(spec) >= own_bits(wanted) and spec.accumulate == wanted.accumulate
    return same and _stages(spec) >= min(_stages(wanted), 2)


def _stages(spec: Forward) -> int:
    return 0 if isinstance(spec.load, SyncLoad) else spec.load.kv_stages


def _objections(spec: Forward) -> tuple[Violation, ...]:
    """What rules have against what is computed, or else against the whole."""
    found = check(spec)
    return tuple(one for one in found if one.field.startswith(_ASKED)) or tuple(found)


# The text


def _text(spec: Forward, base: SpecFile) -> str:
    """A spec file that extends the base and gives this one spec; no field of it could be left out."""
    fields = spec.model_dump()
    for keys, _ in _node(fields).leaves():
        fewer = _without(fields, keys)
        if _merged(base, fewer) == spec:
            fields = fewer
    head = {"summary": "Proposed by fa3gen, never measured", "extends": base.stem}
    return dumps({**head, **fields, "matrix": {}}, flow=None)


def _without(fields: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The fields but for one, and for mappings that are empty then."""
    first, *others = keys
    inner = _without(fields[first], others) if others else None
    return {name: inner if name == first else value for name, value in fields.items() if name != first or inner}


def _merged(base: SpecFile, fields: Mapping[str, Any]) -> Forward | None:
    """The spec that these fields give with the base's, without its matrix; None where they give none."""
    try:
        return Forward.model_validate(merge(_node(base.fields), _node(fields), UNIONS).plain())
    except ValidationError:
        return None


def _node(value: Any) -> Node:
    """Plain values as a tree, which no file holds."""
    held = {key: _node(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value
    return Node(held, Path(), 0)
