"""Rules about attention whose q, k and v have 8 bits."""

from __future__ import annotations

from collections.abc import Sequence

from fa3gen.design.footprint import TRANSPOSED_COLUMNS, TRANSPOSED_KEYS, WARPGROUP_WARPS
from fa3gen.design.rules.registry import GENERATOR, HARDWARE, Violation, rule
from fa3gen.design.rules.wording import yaml
from fa3gen.hardware.dtypes import E4M3, E5M2
from fa3gen.spec.quantizing import BLOCK_ROWS


@rule(kind=HARDWARE, topic="product")
def eight_bit_major(field: str, product: str, tensor: str, major: str) -> Violation | None:
    """Operands of 8 bits are K-major. PTX ISA, "wgmma.mma_async": imm-trans-a and imm-trans-b are for 16 bits only."""
    if major == "k":
        return None
    way_out = "use k and give a q or k whose head dim is contiguous"
    if tensor == "V":
        way_out = "use k, with smem.vt, so that warps transpose V, or without, for a v whose sequence is contiguous"
    return Violation(
        field,
        f"WGMMA transposes operands of 16 bits only, and {tensor} of 8 bits has to lie along what {product} sums over; "
        f"{way_out}",
    )


@rule(kind=GENERATOR, topic="structure")
def eight_bit_kernel(field: str, value: object, rendered: Sequence[object]) -> Violation | None:
    """Products of 8 bits are rendered where warps load and transpose V, and others overlap P V."""
    if value in rendered:
        return None
    ways_out = " or ".join(yaml(each) for each in rendered)
    return Violation(
        field, f"with dtype {E4M3.name} {yaml(value)} is not rendered; use {ways_out}, or dtype bf16 or fp16"
    )


@rule(kind=GENERATOR, topic="O = P V")
def transposed_operand(vt: str | None, dtype: str) -> Violation | None:
    """Warps transpose V where the product could not read it otherwise."""
    if vt is None or dtype == E4M3.name:
        return None
    return Violation(
        "smem.vt",
        f"WGMMA reads V of {dtype} as it was loaded, MN-major; leave smem.vt out, or use dtype {E4M3.name}",
    )


@rule(kind=GENERATOR, topic="O = P V")
def transposed_tile(kv: int, v_dim: int, transposers: int) -> Violation | None:
    """A warp transposes blocks of 32 keys and 16 columns, what ldmatrix.x4 reads: every second or fourth one of a row.

    PTX ISA, "ldmatrix": four matrices of 8 rows of 16 bytes.
    """
    if kv % TRANSPOSED_KEYS:
        return Violation(
            "tile.kv",
            f"warps transpose blocks of {TRANSPOSED_KEYS} keys, and {kv} keys are no whole number of these; use a "
            f"multiple of {TRANSPOSED_KEYS}",
        )
    if v_dim % (TRANSPOSED_COLUMNS * transposers) == 0:
        return None
    fewest = 2 * TRANSPOSED_COLUMNS
    way_out = "use 2" if v_dim % fewest == 0 else f"use 2 with a head dim that is a multiple of {fewest}"
    return Violation(
        "tile.transposers",
        f"{transposers} warps transpose blocks of {TRANSPOSED_COLUMNS} columns, and {v_dim} columns have no whole "
        f"number for each; {way_out}",
    )


@rule(kind=GENERATOR, topic="O = P V")
def transposing_warps(transposers: int, transposes: bool) -> Violation | None:
    """How many warps transpose V is asked only where some do; else a spec says nothing of it: a warpgroup."""
    if transposes or transposers == WARPGROUP_WARPS:
        return None
    return Violation(
        "tile.transposers",
        f"{transposers} warps are to transpose V, and without smem.vt nobody does; leave it out, or with dtype "
        f"{E4M3.name} give smem.vt",
    )


@rule(kind=GENERATOR, topic="O = P V")
def permuted_keys(v_keys: str, dtype: str, vt: str | None, layout: str, kv_from: str) -> Violation | None:
    """Keys are permuted within 16, for P of 8 bits: tiles of keys begin at whole 16, and nobody transposes V."""
    if v_keys == "in_order":
        return None
    if dtype != E4M3.name:
        why = f"P of {dtype} is read as A operand as it is; leave v_keys out, or use dtype {E4M3.name}"
    elif vt is not None:
        why = "warps that transpose V put its keys in P's order themselves; leave v_keys out, or smem.vt"
    elif layout != "dense":
        why = f"sequences of layout {layout} begin anywhere within 16 keys; use in_order, or layout dense"
    elif kv_from != "first_key":
        why = "tiles of keys that begin with a window begin anywhere within 16; use in_order, or kv_from: first_key"
    else:
        return None
    return Violation("problem.v_keys", why)


@rule(kind=GENERATOR, topic="structure")
def mixed_eight_bits(kv_dtype: str | None, warpgroups: int) -> Violation | None:
    """Beside Q and P of e4m3, K and V may be e5m2. PTX ISA, "wgmma.mma_async": .atype and .btype are .e4m3 or .e5m2.

    Nobody converts them.
    """
    if kv_dtype == E4M3.name:
        return Violation(
            "kv.dtype",
            f"k and v have dtype {E4M3.name}, which is that of the problem; leave it out, or use {E5M2.name}",
        )
    if warpgroups == 1:
        return None
    return Violation(
        "kv.warpgroups",
        f"{warpgroups} warpgroups are to convert K and V, which are multiplied as they are; leave it out",
    )


@rule(kind=GENERATOR, topic="O = P V")
def two_levels(promote_every: int, dtype: str, columns: int | None) -> Violation | None:
    """Threads add up what the tensor core has summed of 8 bits, after one tile of keys or after several.

    For that P V goes to accumulators of its own. After one tile, adding these to O takes the place of rescaling O;
    between others, they are rescaled in its place, and have to stay where they are.
    """
    if dtype != E4M3.name:
        return Violation(
            "accumulate",
            f"sums of {dtype} keep enough bits in the tensor core; leave accumulate out, or use dtype {E4M3.name}",
        )
    if promote_every == 1 or columns is None:
        return None
    return Violation(
        "accumulate.promote_every",
        f"sums of {promote_every} tiles of keys stay in registers, in which stripes of {columns} columns take turns; "
        "use 1, or leave accumulate.columns out",
    )


@rule(kind=GENERATOR, topic="O = P V")
def promoted_stripes(columns: int, kv: int, v_dim: int) -> Violation | None:
    """P V of a stripe of O takes the registers of S, of which P has been made: it has as many columns as S has keys."""
    if columns != kv:
        return Violation(
            "accumulate.columns",
            f"P V of {columns} columns is to take turns with S, of {kv} keys, in the same registers; use {kv}, or "
            "leave it out: all columns are promoted at once",
        )
    if columns < v_dim and v_dim % columns == 0:
        return None
    return Violation(
        "accumulate.columns",
        f"{v_dim} columns of O are not two or more stripes of {columns}; use another tile.kv, and as many, or leave it "
        "out: all columns are promoted at once",
    )


@rule(kind=GENERATOR, topic="O = P V")
def striped_kernel(field: str, value: object, rendered: object) -> Violation | None:
    """Stripes of P V follow one another without a softmax beside them, and warpgroups take no turns."""
    if value == rendered:
        return None
    return Violation(
        field,
        f"with accumulate.columns {yaml(value)} is not rendered; use {yaml(rendered)}, or leave columns out",
    )


@rule(kind=GENERATOR, topic="softmax")
def scales_of_blocks(scales: str, dtype: str) -> Violation | None:
    """Only q and k of 8 bits have factors, of heads or of blocks of rows."""
    if scales == "head" or dtype == E4M3.name:
        return None
    return Violation(
        "problem.scales", f"q and k of {dtype} have no factors; leave scales out, or use dtype {E4M3.name}"
    )


@rule(kind=GENERATOR, topic="softmax")
def rows_of_block(field: str, rows: int) -> Violation | None:
    """A tile of queries, and one of keys, lies in one block, so that a step has one factor for all of its scores."""
    if BLOCK_ROWS % rows == 0:
        return None
    return Violation(
        field,
        f"{rows} rows would lie in several blocks of {BLOCK_ROWS} rows, with a factor each; use a divisor of "
        f"{BLOCK_ROWS}, or scales: head",
    )


@rule(kind=GENERATOR, topic="O = P V")
def sums_of_blocks(promote_every: int, stripes: int) -> Violation | None:
    """P V of each tile of keys is added to O by threads, since V of each tile has a factor."""
    if promote_every == stripes == 1:
        return None
    return Violation(
        "accumulate",
        "with scales: block V of each tile of keys has a factor, by which threads add P V of the tile to O; use "
        "accumulate: {promote_every: 1}, or scales: head",
    )


@rule(kind=GENERATOR, topic="softmax")
def block_scale_kernel(field: str, value: object, rendered: Sequence[object]) -> Violation | None:
    """A step's own factor is rendered without a window, sinks and a cap, and where a CTA has all keys of its tiles."""
    if value in rendered:
        return None
    ways_out = " or ".join(yaml(each) for each in rendered)
    return Violation(field, f"with scales: block {yaml(value)} is not rendered; use {ways_out}, or scales: head")
