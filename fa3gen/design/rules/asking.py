"""From a spec to facts: every rule that can be asked about a spec is asked here."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fa3gen.design import footprint
from fa3gen.design.cta import cta_of
from fa3gen.design.masks import given_with_calls
from fa3gen.design.rules import (
    asking_combine,
    asking_copies,
    asking_gemm,
    asking_quantize,
    converting,
    eight_bits,
    memory,
    output,
    pages,
    parts,
    products,
    scalar,
    schedules,
    splits,
    taste,
    threads,
    warps,
)
from fa3gen.design.rules.registry import Answer, Violation
from fa3gen.design.tiles import operand_tiles, sequence_contiguous
from fa3gen.hardware import hopper
from fa3gen.spec.model import (
    Combine,
    Copy,
    CpAsyncLoad,
    Forward,
    Gemm,
    GlobalHandoff,
    Quantize,
    ScalarProduct,
    Spec,
    TmaLoad,
    WgmmaProduct,
    WindowMask,
)


def check(spec: Spec) -> list[Violation]:
    """Why there is no kernel for this spec: every violation, in the order of the spec's fields as far as rules go."""
    return _violations(answer for answer in answers(spec) if answer.refuses)


def warnings(spec: Spec) -> list[Violation]:
    """What is not advisable about a legal spec; nothing about one that is refused."""
    return _violations(answer for answer in answers(spec) if not answer.refuses)


def _violations(found: Iterable[Answer]) -> list[Violation]:
    return list(dict.fromkeys(answer.violation for answer in found if answer.violation is not None))


def answers(spec: Spec) -> list[Answer]:
    """Every question that the rules can be asked about this spec, with what they said."""
    match spec:
        case Forward():
            return _of_forward(spec)
        case Gemm():
            return asking_gemm.answers(spec)
        case Copy():
            return asking_copies.answers(spec)
        case Combine():
            return asking_combine.answers(spec)
        case Quantize():
            return asking_quantize.answers(spec)


def _of_forward(spec: Forward) -> list[Answer]:
    """Those about attention.

    The rules of footprint (shared memory, registers) need a spec whose parts go together, those of taste a legal one;
    they are asked about such specs only.
    """
    found = list(_structure(spec))
    sound = not any(answer.refuses for answer in found)
    found += _shapes(spec)
    if sound:
        found += _footprint(spec)
    if not any(answer.refuses for answer in found):
        found += _taste(spec)
    return found


def _structure(spec: Forward) -> Iterable[Answer]:
    wgmma = "wgmma" in (spec.qk.engine, spec.pv.engine)
    by_warps = footprint.by_warps(spec)
    through = spec.handoff.through
    pv_a_source = spec.pv.a.source if isinstance(spec.pv, WgmmaProduct) else None
    yield threads.thread_unit.ask(wgmma or by_warps, spec.tile.threads, spec.tile.warpgroups)
    yield parts.engine_pair.ask(spec.qk.engine, spec.pv.engine)
    yield parts.wgmma_load.ask(wgmma, spec.load.engine)
    yield parts.handoff_engines.ask(through, spec.qk.engine, spec.pv.engine, pv_a_source)
    yield parts.global_handoff_load.ask(through, spec.load.engine)
    yield parts.smem_section.ask(through, spec.smem is not None)
    if not by_warps:
        yield parts.window_product.ask(spec.mask.kind, spec.pv.engine)
    sides = (spec.mask.left, spec.mask.right) if isinstance(spec.mask, WindowMask) else (None, None)
    yield parts.window_sides.ask(spec.mask.kind, *sides)
    yield parts.optional_lse.ask(spec.outputs.lse, spec.pv.engine)
    if isinstance(spec.load, TmaLoad):
        yield memory.q_stages.ask(spec.load.q_stages, spec.schedule.kind)
        yield memory.late_draws.ask(spec.load.tile_slots, footprint.drawn_sequences(spec))
        yield pages.page_layout.ask(spec.problem.layout, spec.load.page_rows)
        if spec.load.page_rows == 1:
            yield pages.gathered_rows.ask("problem.head_dim", spec.problem.head_dim)
            yield pages.gathered_rows.ask(_v_dim_field(spec), spec.problem.v_dim)
            if spec.smem is not None and not footprint.converts(spec):
                for field, swizzle, dim in (
                    ("smem.k", spec.smem.k, spec.problem.head_dim),
                    ("smem.v", spec.smem.v, spec.problem.v_dim),
                ):
                    yield pages.gathered_swizzle.ask(field, swizzle, dim * spec.kv_element.bytes)
        elif spec.load.page_rows is not None:
            yield pages.page_boxes.ask(spec.load.page_rows, spec.tile.kv)
    yield from _eight_bits(spec)
    yield from _converting(spec)
    if by_warps:
        yield from _by_warps(spec)
    yield from _schedule(spec)


def _eight_bits(spec: Forward) -> Iterable[Answer]:
    dtype = spec.problem.dtype
    if spec.smem is not None:
        yield eight_bits.transposed_operand.ask(spec.smem.vt, dtype)
    vt = None if spec.smem is None else spec.smem.vt
    yield eight_bits.permuted_keys.ask(spec.problem.v_keys, dtype, vt, spec.problem.layout, spec.tile.kv_from)
    yield eight_bits.transposing_warps.ask(spec.tile.transposers, footprint.transposes(spec))
    if spec.accumulate is not None:
        yield eight_bits.two_levels.ask(spec.accumulate.promote_every, dtype, spec.accumulate.columns)
        if spec.accumulate.columns is not None:
            yield eight_bits.promoted_stripes.ask(spec.accumulate.columns, spec.tile.kv, spec.problem.v_dim)
            held_back = spec.softmax.exp_before_wait
            yield eight_bits.striped_kernel.ask("schedule.kind", spec.schedule.kind, "warp_specialized")
            yield eight_bits.striped_kernel.ask("softmax.exp_before_wait", held_back, None)
    yield eight_bits.scales_of_blocks.ask(spec.problem.scales, dtype)
    if not footprint.eight_bits(spec):
        return
    yield eight_bits.mixed_eight_bits.ask(spec.kv.dtype, spec.kv.warpgroups)
    softmax, tile, packed = spec.softmax, spec.tile, footprint.packed_sequences(spec)
    even = packed and spec.scheduler == "even"
    if footprint.block_scales(spec):
        yield eight_bits.rows_of_block.ask("tile.q", tile.q)
        yield eight_bits.rows_of_block.ask("tile.kv", tile.kv)
        yield eight_bits.sums_of_blocks.ask(footprint.promote_every(spec), footprint.stripes(spec))
        yield eight_bits.block_scale_kernel.ask("problem.layout", spec.problem.layout, ("dense",))
        yield eight_bits.block_scale_kernel.ask("mask", spec.mask.kind, ("none", "causal"))
        yield eight_bits.block_scale_kernel.ask("scheduler", spec.scheduler, ("single_tile", "static", "dynamic"))
        yield eight_bits.block_scale_kernel.ask("softmax.sink", softmax.sink, (False,))
        yield eight_bits.block_scale_kernel.ask("softmax.softcap", softmax.softcap, (False,))
    rendered: dict[str, tuple[object, tuple[object, ...]]] = {
        "qk.engine": (spec.qk.engine, ("wgmma",)),
        "schedule.kind": (spec.schedule.kind, ("warp_specialized", "ping_pong")),
        "schedule.overlap": (footprint.overlapped(spec), (True,)),
        "scheduler": (
            spec.scheduler,
            ("dynamic", "even") if packed else ("single_tile", "static", "stream_k", "dynamic"),
        ),
        "problem.layout": (spec.problem.layout, ("dense", "packed", "paged")),
        "problem.head_dim_v": (spec.problem.v_dim, (spec.problem.head_dim,)),
        "tile.group": (tile.group, ("at_most", "fitted") if even else ("multiple", "any")),
        "tile.pack_heads": (tile.pack_heads, (tile.pack_heads,) if even or tile.group == "any" else (1,)),
        "tile.ctas_per_sm": (tile.ctas_per_sm, (1, 2) if packed else (1,)),
        "split": (None if spec.split is None else "split", ("split",) if even else (None,)),
        "outputs.o": (spec.outputs.o, ("direct",) if even or tile.group == "any" else ("own_buffer",)),
        "softmax.row_max": (softmax.row_max, ("online",)),
        "softmax.rescale_above": (softmax.rescale_above, (None,)),
    }
    for field, (value, values) in rendered.items():
        yield eight_bits.eight_bit_kernel.ask(field, value, values)
    if packed:  # of the producer's warps one finds tiles, one loads, and two are left
        yield eight_bits.eight_bit_kernel.ask("tile.transposers", tile.transposers, (2,))
        yield eight_bits.eight_bit_kernel.ask("smem.vt", spec.smem and spec.smem.vt, ("128B", "64B", "32B"))
    if footprint.persistent(spec):  # else the place of Q would be free with the last K
        yield eight_bits.eight_bit_kernel.ask("load.q_stages", footprint.q_stages(spec), (2,))


def _by_warps(spec: Forward) -> Iterable[Answer]:
    """Where each warp multiplies keys of its own."""
    tile, softmax, smem = spec.tile, spec.softmax, spec.smem
    rendered: dict[str, tuple[object, tuple[object, ...]]] = {
        "problem.head_dim": (spec.problem.head_dim, (64, 128) if footprint.eight_bit_cache(spec) else (64,)),
        "problem.head_dim_v": (spec.problem.v_dim, (spec.problem.head_dim,)),
        "problem.dtype": (spec.problem.dtype, ("bf16", "fp16")),
        "problem.layout": (spec.problem.layout, ("packed", "paged")),
        "kv.warpgroups": (spec.kv.warpgroups, (1,)),
        "load.page_rows": (footprint.page_rows(spec), (None, 8, 16, 64, 128)),
        "mask": (spec.mask.kind, ("causal", "window")),
        "tile.q": (tile.q, (hopper.MMA_M,)),
        "tile.warpgroups": (tile.warpgroups, (1,)),
        "tile.group": (tile.group, ("at_most", "fitted")),
        "smem.k": (smem and smem.k, (_row_swizzle(spec),)),
        "smem.v": (smem and smem.v, (_row_swizzle(spec),)),
        "schedule.kind": (spec.schedule.kind, ("warp_specialized",)),
        "schedule.overlap": (footprint.overlapped(spec), (False,)),
        "scheduler": (spec.scheduler, ("even",)),
        "split.keys": (spec.split and spec.split.keys, (None,)),
        "outputs.o": (spec.outputs.o, ("direct",)),
        "softmax.softcap": (softmax.softcap, (False,)),
    }
    if isinstance(spec.mask, WindowMask):
        rendered["mask.left"] = spec.mask.left, (None,)
    if spec.problem.head_dim == 128:  # of one alone ptxas widens K of 32 keys at once, and spills
        rendered["tile.ctas_per_sm"] = tile.ctas_per_sm, (2,)
    for field, (value, values) in rendered.items():
        yield warps.warp_kernel.ask(field, value, values)
    yield warps.keys_of_warps.ask(tile.kv, (tile.warpgroups or 0) * footprint.WARPGROUP_WARPS)


def _row_swizzle(spec: Forward) -> str:
    """That of whole rows of K and V, of 128 bytes at most: lanes that read vectors of several rows meet no bank.

    A row of 128 bytes has all 32 banks, and the swizzle gives each of 8 rows another order of its vectors.
    """
    return f"{spec.problem.head_dim * spec.kv_element.bytes}B"


def _converting(spec: Forward) -> Iterable[Answer]:
    yield converting.stored_stages.ask(spec.kv.stages, footprint.converts(spec))
    if footprint.converts(spec):
        structure = spec.schedule.kind, spec.problem.layout, spec.load.engine
        yield converting.converting_kernel.ask(
            *structure, footprint.overlapped(spec), spec.tile.warpgroups or 0, spec.kv.warpgroups
        )
        for field, dim in (("problem.head_dim", spec.problem.head_dim), (_v_dim_field(spec), spec.problem.v_dim)):
            yield converting.converted_rows.ask(field, dim, spec.tile.kv, footprint.converting_warps(spec))


def _schedule(spec: Forward) -> Iterable[Answer]:
    kind = spec.schedule.kind
    yield schedules.schedule_engines.ask(kind, spec.qk.engine, spec.pv.engine)
    yield schedules.schedule_handoff.ask(kind, spec.handoff.through)
    yield schedules.schedule_pack.ask(kind, spec.tile.pack_heads)
    yield schedules.schedule_v_dim.ask(kind, spec.problem.head_dim, spec.problem.v_dim)
    yield schedules.schedule_ctas.ask(kind, spec.tile.ctas_per_sm)
    if isinstance(spec.load, TmaLoad):
        yield schedules.schedule_barrier.ask(kind, spec.load.barrier)
    yield from _scheduler(spec)
    if footprint.specialized(spec) and spec.tile.warpgroups is not None:
        yield threads.consumer_warpgroups.ask(spec.tile.warpgroups)
        yield schedules.ping_pong_partners.ask(kind, spec.tile.warpgroups)


def _scheduler(spec: Forward) -> Iterable[Answer]:
    yield schedules.scheduler_schedule.ask(spec.scheduler, spec.schedule.kind)
    yield schedules.grid_loads.ask(spec.scheduler, footprint.overlapped(spec), footprint.q_stages(spec))
    yield schedules.persistent_ctas.ask(spec.scheduler, spec.problem.layout, spec.tile.ctas_per_sm)
    where = given_with_calls(spec.mask), footprint.overlapped(spec) or footprint.by_warps(spec), spec.scheduler
    yield schedules.kv_from_window.ask(spec.tile.kv_from, *where)
    overlap = footprint.overlapped(spec) or footprint.by_warps(spec)  # whose products are synchronous
    yield schedules.packed_overlap.ask(spec.problem.layout, overlap)
    yield schedules.packed_output.ask(spec.problem.layout, spec.outputs.lse, spec.o_dtype, spec.problem.dtype)
    yield schedules.packed_scheduler.ask(spec.problem.layout, spec.scheduler)
    yield schedules.order_of_packed.ask(spec.order, spec.problem.layout, spec.scheduler)
    bare = not footprint.eight_bits(spec) and not footprint.converts(spec)
    bare = bare and spec.softmax.restart_every is None and spec.softmax.row_max == "online"
    yield schedules.order_woven.ask(spec.order, spec.schedule.kind, spec.mask.kind, spec.tile.group, bare=bare)
    yield splits.even_shares.ask(spec.scheduler, spec.split is not None)
    yield schedules.scheduler_mask.ask(spec.scheduler, spec.mask.kind, spec.problem.layout)
    if footprint.shares_packed(spec) and spec.problem.layout == "packed":
        yield from _packed_shares(spec)
    yield output.output_dtype.ask(spec.problem.dtype, spec.o_dtype)
    if spec.o_dtype == "fp32":
        yield output.float32_output.ask(spec.schedule.kind, spec.outputs.o, spec.tile.q, spec.problem.v_dim)
    else:
        yield output.scheduler_output.ask(spec.scheduler, spec.outputs.o, spec.schedule.kind, spec.pv.engine)
    yield output.packed_slices.ask(spec.outputs.o, spec.tile.pack_heads)
    yield schedules.rescale_overlap.ask(spec.softmax.rescale_above, footprint.overlapped(spec))
    yield from _row_max(spec)
    yield from _restart(spec)
    yield from _split(spec)
    yield schedules.exp_before_wait.ask(spec.softmax.exp_before_wait, spec.tile.kv, footprint.overlapped(spec))
    for field, used in (("softmax.sink", spec.softmax.sink), ("softmax.softcap", spec.softmax.softcap)):
        if used and not footprint.by_warps(spec):
            yield schedules.score_fields.ask(field, spec.pv.engine, spec.schedule.kind, footprint.overlapped(spec))
    if spec.softmax.sink:
        yield output.sink_lse.ask(spec.outputs.lse)
        yield output.sink_scheduler.ask(spec.scheduler)
    yield schedules.mask_end.ask(spec.softmax.mask_end, spec.mask.kind, footprint.overlapped(spec))


def _packed_shares(spec: Forward) -> Iterable[Answer]:
    rendered: dict[str, tuple[object, tuple[object, ...]]] = {
        "problem.dtype": (spec.problem.dtype, ("bf16", "fp16")),
        "kv.dtype": (spec.kv.dtype, (None,)),
        "tile.pack_heads": (spec.tile.pack_heads, (1,)),
        "tile.group": (spec.tile.group, ("multiple",)),
        "tile.ctas_per_sm": (spec.tile.ctas_per_sm, (1,)),
        "softmax.softcap": (spec.softmax.softcap, (False,)),
    }
    for field, (value, values) in rendered.items():
        yield schedules.packed_shares.ask(field, value, values)


def _restart(spec: Forward) -> Iterable[Answer]:
    softmax = spec.softmax
    if softmax.restart_every is None:
        return
    yield splits.restarted_parts.ask(softmax.restart_every, spec.tile.kv, softmax.rescale_above)
    rendered: dict[str, tuple[object, tuple[object, ...]]] = {
        "problem.layout": (spec.problem.layout, ("packed", "paged")),
        "problem.dtype": (spec.problem.dtype, ("bf16", "fp16")),
        "kv.dtype": (spec.kv.dtype, (None,)),
        "mask": (spec.mask.kind, ("none", "causal")),
        "scheduler": (spec.scheduler, ("dynamic",)),
        "schedule.overlap": (footprint.overlapped(spec), (True,)),
        "tile.pack_heads": (spec.tile.pack_heads, (1, 4, 8)),
        "outputs.o": (spec.outputs.o, ("own_buffer",)),
        "softmax.row_max": (softmax.row_max, ("online",)),
        "softmax.sink": (softmax.sink, (False,)),
        "softmax.softcap": (softmax.softcap, (False,)),
    }
    for field, (value, values) in rendered.items():
        yield splits.restarted_kernel.ask(field, value, values)


def _of_fitted(spec: Forward) -> dict[str, bool]:
    """What is not rendered where calls decide how many heads a tile holds."""
    return {
        "sink": spec.softmax.sink,
        "whole": spec.split is not None and spec.split.keys is not None,
        "overlap": footprint.overlapped(spec) or footprint.by_warps(spec),  # whose products are synchronous
        "from_window": spec.tile.kv_from == "window",
    }


def _split(spec: Forward) -> Iterable[Answer]:
    layout, place = spec.problem.layout, spec.outputs.o
    if spec.tile.holds_group:
        yield splits.padded_heads.ask(spec.split is not None, spec.tile.pack_heads)
    if spec.tile.group == "any":
        others = {"split": spec.split is not None, "sink": spec.softmax.sink}
        yield splits.any_group.ask(spec.order, place, spec.tile.pack_heads, **others)
    if spec.tile.group == "fitted":
        yield splits.fitted_heads.ask(spec.scheduler, spec.mask.kind, spec.tile.pack_heads, **_of_fitted(spec))
    if spec.split is None:
        return
    yield splits.split_unit.ask(spec.split.count, spec.split.keys)
    if spec.split.keys is not None:
        yield splits.split_keys.ask(spec.split.keys, spec.tile.kv, spec.softmax.rescale_above)
    yield splits.split_scheduler.ask(spec.scheduler, layout, spec.tile.group)
    yield splits.even_parts.ask(spec.scheduler, spec.split.keys if spec.split else None, spec.tile.ctas_per_sm)
    if spec.scheduler == "even" and spec.split.keys is not None:
        rendered: dict[str, tuple[object, tuple[object, ...]]] = {
            "problem.dtype": (spec.problem.dtype, ("bf16", "fp16")),
            "kv.dtype": (spec.kv.dtype, (None,)),
            "mask": (spec.mask.kind, ("none", "causal")),
            "softmax.sink": (spec.softmax.sink, (False,)),
        }
        for field, (value, values) in rendered.items():
            yield splits.even_whole_parts.ask(field, value, values)
        yield splits.rows_in_warps.ask(spec.problem.v_dim)
    yield splits.split_output.ask(place, spec.outputs.lse, spec.o_dtype, spec.problem.dtype)
    scores = spec.mask.kind, spec.tile.kv_from, spec.softmax.sink, spec.softmax.row_max
    yield splits.split_scores.ask(*scores, spec.scheduler)
    yield splits.combine_columns.ask(spec.problem.v_dim)


def _row_max(spec: Forward) -> Iterable[Answer]:
    softmax = spec.softmax
    if softmax.row_max == "online":
        return
    yield schedules.unbounded_scores.ask(softmax.row_max, softmax.softcap, spec.problem.dtype)
    rest = footprint.overlapped(spec), softmax.rescale_above, softmax.sink, spec.scheduler
    yield schedules.first_maximum.ask(softmax.row_max, *rest)


def _shapes(spec: Forward) -> Iterable[Answer]:
    head_dim, tile = spec.problem.head_dim, spec.tile
    if isinstance(spec.qk, WgmmaProduct):
        yield from _qk_operands(spec.qk, spec)
        yield products.wgmma_columns.ask("tile.kv", "QK", tile.kv)
        yield products.wgmma_depth.ask("problem.head_dim", "QK", head_dim, spec.element.wgmma_k)
    if isinstance(spec.pv, WgmmaProduct):
        yield from _pv_operands(spec.pv, spec)
        yield products.wgmma_columns.ask(_v_dim_field(spec), "PV", spec.problem.v_dim)
        yield products.wgmma_depth.ask("tile.kv", "PV", tile.kv, spec.element.wgmma_k)
        if footprint.transposes(spec):
            yield eight_bits.transposed_tile.ask(tile.kv, spec.problem.v_dim, tile.transposers)
        if isinstance(spec.qk, WgmmaProduct):
            yield products.operands_apart.ask(spec.qk.a.source, spec.pv.a.source, head_dim, tile.kv)
    if tile.warpgroups is not None and "wgmma" in (spec.qk.engine, spec.pv.engine):
        yield products.wgmma_rows.ask(tile.q, tile.warpgroups)
        yield products.rows_per_warpgroup.ask(tile.q, tile.warpgroups)
        yield threads.wgmma_threads.ask(tile.warpgroups)
        if spec.qk.engine == "wgmma" and spec.pv.engine == "scalar":
            yield scalar.scattered_scores.ask(tile.warpgroups)
    yield output.packed_rows.ask(tile.q, tile.pack_heads)
    yield from _output(spec)
    if tile.threads is not None:
        yield from _thread_tile(spec, tile.threads)
    if isinstance(spec.pv, ScalarProduct) and not isinstance(spec.handoff, GlobalHandoff):
        yield scalar.scalar_vector.ask(head_dim)
    yield from _tiles_in_smem(spec)


def _v_dim_field(spec: Forward) -> str:
    return "problem.head_dim" if spec.problem.head_dim_v is None else "problem.head_dim_v"


def _qk_operands(qk: WgmmaProduct, spec: Forward) -> Iterable[Answer]:
    kind, pv_engine = spec.schedule.kind, spec.pv.engine
    yield products.q_from_registers.ask(qk.a.source, kind, pv_engine)
    yield products.a_from_registers.ask("qk", qk.a.source, qk.a.major)
    if qk.a.source == "smem":
        yield products.input_major.ask("qk.a.major", "Q", qk.a.major, "k", kind, pv_engine)
    yield products.b_from_smem.ask("qk", qk.b.source)
    if footprint.eight_bits(spec):
        yield eight_bits.eight_bit_major.ask("qk.a.major", "qk", "Q", qk.a.major)
        yield eight_bits.eight_bit_major.ask("qk.b.major", "qk", "K", qk.b.major)
    yield products.input_major.ask("qk.b.major", "K", qk.b.major, "k", kind, pv_engine)


def _pv_operands(pv: WgmmaProduct, spec: Forward) -> Iterable[Answer]:
    yield products.a_from_registers.ask("pv", pv.a.source, pv.a.major)
    yield products.b_from_smem.ask("pv", pv.b.source)
    if footprint.eight_bits(spec):
        yield eight_bits.eight_bit_major.ask("pv.b.major", "pv", "V", pv.b.major)
    else:
        yield products.input_major.ask("pv.b.major", "V", pv.b.major, "mn", spec.schedule.kind, pv.engine)


def _output(spec: Forward) -> Iterable[Answer]:
    head_dim, v_dim, o = spec.problem.head_dim, spec.problem.v_dim, spec.outputs.o
    if v_dim != head_dim:
        if o == "over_q":
            yield output.output_over_q.ask(head_dim, v_dim)
        if o != "direct":
            yield output.output_columns.ask(v_dim)
    if o == "direct" and spec.o_dtype != "fp32":
        yield output.direct_columns.ask(_v_dim_field(spec), v_dim, spec.schedule.kind)


def _thread_tile(spec: Forward, count: int) -> Iterable[Answer]:
    counted = [threads.scalar_threads.ask(count), threads.whole_warps.ask(count)]
    yield from counted
    scalar_only = isinstance(spec.qk, ScalarProduct) and isinstance(spec.pv, ScalarProduct)
    if not scalar_only or any(answer.refuses for answer in counted):
        return
    if isinstance(spec.handoff, GlobalHandoff):
        yield scalar.naive_scores.ask(spec.tile.q, spec.tile.kv, count)
        yield scalar.naive_rows.ask(spec.problem.head_dim, count)
        return
    rows = {"tile.q": spec.tile.q, "tile.kv": spec.tile.kv}
    grids = {field: scalar.scalar_grid.ask(field, extent, count) for field, extent in rows.items()}
    yield from grids.values()
    yield scalar.scalar_grid.ask("problem.head_dim", spec.problem.head_dim, count)
    if spec.load.engine != "tma":
        for field, extent in rows.items():
            if not grids[field].refuses:
                yield scalar.copy_rows.ask(field, extent, spec.problem.head_dim, count)


def _tiles_in_smem(spec: Forward) -> Iterable[Answer]:
    head_dim, v_dim = spec.problem.head_dim, spec.problem.v_dim
    tma, tiles = spec.load.engine == "tma", operand_tiles(spec)
    for letter, tile in tiles.items():
        field, tensor = f"smem.{letter.lower()}", str(letter)
        if letter == "P":
            field = "handoff.swizzle"
        elif letter == "O":
            if (tile.inner, tile.element) == (tiles["Q"].inner, tiles["Q"].element) and not tiles["Q"].by_sequence:
                continue  # its rows are Q's
            where = "in Q's place" if spec.outputs.o == "over_q" else "laid out like Q"
            field, tensor = "smem.q", f"O, {where},"
        line = "column" if tile.by_sequence else "row"
        by_tma, each = tma and letter not in ("P", "Vt"), tile.element.bytes
        yield memory.swizzle_span.ask(field, tensor, tile.inner, tile.swizzle, tma=by_tma, line=line, each=each)
    if tma:
        yield memory.tma_box.ask("tile.q", spec.tile.q)
        yield memory.tma_box.ask("tile.kv", spec.tile.kv)
        if sequence_contiguous(spec):
            yield memory.tma_box.ask("problem.head_dim", head_dim)
        yield memory.tma_stride.ask(head_dim, each=spec.element.bytes)
        yield memory.tma_stride.ask(v_dim, _v_dim_field(spec), each=spec.element.bytes)


def _footprint(spec: Forward) -> Iterable[Answer]:
    yield _shared_memory(spec)
    held = footprint.registers_per_thread(spec)
    if footprint.specialized(spec):
        if spec.tile.ctas_per_sm > 1:
            yield from _shared_sm(spec)
        elif footprint.converts(spec):
            columns, launched = footprint.accumulator_columns(spec), footprint.launch_registers(spec)
            yield converting.accumulator_beside_converters.ask(spec.kv.warpgroups, columns, launched)
        _, budget = footprint.register_budget(spec)
        yield threads.consumer_registers.ask(held, spec.tile.warpgroups or 0, footprint.overlapped(spec), budget)
        return
    yield threads.registers_per_thread.ask(held)
    field = "tile.threads" if spec.tile.threads is not None else "tile.warpgroups"
    yield threads.registers_per_sm.ask(field, footprint.threads(spec), held)


def _shared_sm(spec: Forward) -> Iterable[Answer]:
    """Whether several CTAs fit an SM."""
    total = footprint.total_bytes(footprint.shared_memory_map(spec), footprint.barrier_bytes(spec))
    yield memory.shared_sm.ask(spec.tile.ctas_per_sm, total)
    if footprint.by_warps(spec):
        return
    columns, launched = footprint.accumulator_columns(spec), footprint.launch_registers(spec)
    yield threads.accumulator_at_launch.ask(spec.tile.ctas_per_sm, columns, launched)


def _taste(spec: Forward) -> Iterable[Answer]:
    if isinstance(spec.load, TmaLoad):
        yield taste.idle_q_stages.ask(spec.load.q_stages, footprint.persistent(spec))
    if not footprint.packed_sequences(spec):
        yield taste.drawn_without_mask.ask(spec.scheduler, spec.mask.kind)
    yield taste.dealt_under_causal.ask(spec.scheduler, spec.mask.kind)
    yield taste.rescale_few_columns.ask(spec.softmax.rescale_above, spec.problem.v_dim)
    head_dim, v_dim = spec.problem.head_dim, spec.problem.v_dim
    if not footprint.eight_bits(spec):  # whose Q has no room for O
        yield taste.buffer_for_one_output.ask(spec.scheduler, spec.outputs.o, spec.tile.q, head_dim, v_dim)


# Shared memory, with what would fit


def _shared_memory(spec: Forward) -> Answer:
    """The rule `shared_memory`, with the most stages and the widest kv tile that would fit as ways out."""
    facts = memory.smem_facts(cta_of(spec))
    answer = memory.shared_memory.ask(*facts)
    if not answer.refuses:
        return answer
    ways_out = []
    field = "tile.kv"
    if isinstance(spec.load, CpAsyncLoad | TmaLoad):
        stages = _largest(spec.load.kv_stages - 1, lambda count: _fits(_with(spec, "load", kv_stages=count)))
        if stages:
            field = "load.kv_stages"
            ways_out.append(f"at most {stages} stage{'s' if stages > 1 else ''}")
    step = hopper.WGMMA_K_16BIT
    tiles = _largest((spec.tile.kv - 1) // step, lambda count: _fits(_with(spec, "tile", kv=count * step)))
    if tiles:
        ways_out.append(f"tile.kv {tiles * step}")
    if not ways_out:
        ways_out.append("a smaller tile.q or head_dim")
    return memory.shared_memory.ask(*facts, field=field, ways_out=ways_out)


def _fits(spec: Forward) -> bool:
    return memory.shared_memory(*memory.smem_facts(cta_of(spec))) is None


def _with(spec: Forward, part: str, **changes: int) -> Forward:
    return spec.model_copy(update={part: getattr(spec, part).model_copy(update=changes)})


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest count in 1..most that fits, given that every smaller one fits too; 0 when none does."""
    low, high = 0, max(most, 0)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
