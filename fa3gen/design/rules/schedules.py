"""Rules about schedules (who does what in a CTA) and schedulers (which tiles it takes)."""

from __future__ import annotations

from collections.abc import Sequence

from fa3gen.design.rules.registry import GENERATOR, HARDWARE, Violation, rule
from fa3gen.design.rules.wording import yaml
from fa3gen.spec.model import MOST_EXPONENT, AttentionDType, usual_output


@rule(kind=GENERATOR, topic="schedule")
def schedule_engines(kind: str, qk_engine: str, pv_engine: str) -> Violation | None:
    """A warpgroup of its own for the copies is rendered where the others feed the tensor core only."""
    if kind == "cooperative" or (qk_engine, pv_engine) in (("wgmma", "wgmma"), ("mma", "mma")):
        return None
    return Violation(
        "schedule.kind",
        f"{kind} needs wgmma for qk and pv, got {qk_engine} and {pv_engine}; use cooperative, or extend k4_2",
    )


@rule(kind=GENERATOR, topic="P")
def schedule_handoff(kind: str, through: str) -> Violation | None:
    """In a specialised kernel P goes from one product to the next without leaving the registers."""
    if kind == "cooperative" or through != "smem_16bit":
        return None
    return Violation(
        "handoff.through",
        f"P through shared memory is rendered with schedule cooperative only, not {kind}; use registers",
    )


@rule(kind=GENERATOR, topic="loads")
def schedule_barrier(kind: str, barrier: str) -> Violation | None:
    """K and V each have their barriers. With one for both, Q K^T of a tile would wait for V of it, too."""
    if kind == "cooperative" or barrier != "shared":
        return None
    return Violation(
        "load.barrier",
        f"with {kind} K of the next tile is in use before V of this one is free, so that they cannot share a barrier; "
        "use separate",
    )


@rule(kind=GENERATOR, topic="tile")
def schedule_v_dim(kind: str, head_dim: int, v_dim: int) -> Violation | None:
    """A head dim of its own for v and O is rendered for specialised kernels, which serve such models."""
    if kind != "cooperative" or v_dim == head_dim:
        return None
    return Violation(
        "problem.head_dim_v",
        f"head_dim_v {v_dim} beside head_dim {head_dim} is rendered with schedule warp_specialized or ping_pong only; "
        "extend k5 or k6, or leave head_dim_v out",
    )


@rule(kind=GENERATOR, topic="tile")
def schedule_pack(kind: str, pack_heads: int) -> Violation | None:
    """Packing of query heads is rendered for specialised kernels, as grouped heads use them."""
    if kind != "cooperative" or pack_heads == 1:
        return None
    return Violation(
        "tile.pack_heads",
        f"a tile of {pack_heads} query heads is rendered with schedule warp_specialized or ping_pong only; "
        "extend k5 or k6, or use pack_heads 1",
    )


@rule(kind=GENERATOR, topic="structure")
def schedule_ctas(kind: str, ctas: int) -> Violation | None:
    """How many CTAs share an SM is asked for where setmaxnreg deals out registers; others share as they fit."""
    if kind != "cooperative" or ctas == 1:
        return None
    return Violation(
        "tile.ctas_per_sm",
        "CTAs of a cooperative kernel share an SM as far as they fit; use ctas_per_sm 1, or schedule warp_specialized",
    )


@rule(kind=GENERATOR, topic="kv order")
def kv_from_window(kv_from: str, given: bool, overlap: bool, scheduler: str) -> Violation | None:
    """Tiles of keys begin with a window where calls give it, and a persistent CTA knows the first key of a tile."""
    if kv_from == "first_key" or (given and overlap and scheduler in ("static", "dynamic", "even")):
        return None
    return Violation(
        "tile.kv_from",
        "kv_from: window is rendered with windows that calls give (mask {kind: window}), overlap: true, and scheduler "
        "static, dynamic or even; use first_key",
    )


@rule(kind=GENERATOR, topic="q order")
def grid_loads(scheduler: str, overlap: bool, q_stages: int) -> Violation | None:
    """With scheduler grid the one Q and the first K are loaded before all else, for consumers that overlap."""
    if scheduler != "grid":
        return None
    if not overlap:
        return Violation(
            "scheduler", "grid is rendered with overlap: true only; use single_tile, or a schedule with overlap: true"
        )
    if q_stages == 1:
        return None
    return Violation("load.q_stages", f"with scheduler grid a CTA has one tile of queries, not {q_stages}; use 1")


@rule(kind=GENERATOR, topic="q order")
def persistent_ctas(scheduler: str, layout: str, ctas: int) -> Violation | None:
    """Of kernels whose CTAs take tile after tile, those for packed sequences may have several on an SM."""
    if scheduler in ("single_tile", "grid") or layout != "dense" or ctas == 1:
        return None
    return Violation(
        "tile.ctas_per_sm",
        f"{scheduler} with layout {layout} is rendered for a CTA on each SM, not {ctas}; use ctas_per_sm 1, or "
        "scheduler grid or single_tile",
    )


@rule(kind=GENERATOR, topic="structure")
def ping_pong_partners(kind: str, count: int) -> Violation | None:
    """Turns are taken by two warpgroups or more."""
    if kind != "ping_pong" or count > 1:
        return None
    return Violation(
        "tile.warpgroups",
        "ping_pong needs consumer warpgroups that take turns, and there is 1; "
        "use warpgroups 2 with tile.q 128, or schedule warp_specialized",
    )


@rule(kind=GENERATOR, topic="q order")
def scheduler_schedule(scheduler: str, kind: str) -> Violation | None:
    """A CTA takes many tiles where the roles walk through them on their own."""
    if scheduler == "single_tile" or kind != "cooperative":
        return None
    return Violation(
        "scheduler",
        f"{scheduler} needs schedule warp_specialized or ping_pong, got {kind}; use single_tile, or extend k6",
    )


@rule(kind=GENERATOR, topic="q order")
def scheduler_mask(scheduler: str, mask: str, layout: str) -> Violation | None:
    """The last wave is dealt out in equal shares of tiles of keys where no mask hides any."""
    if scheduler != "stream_k" or mask == "none":
        return None
    return Violation(
        "scheduler",
        f"stream_k deals out the last wave as if every tile of queries visited all keys, and mask {mask} hides some; "
        f"use {'static' if mask == 'window' and layout == 'dense' else 'dynamic'}",
    )


@rule(kind=GENERATOR, topic="q order")
def packed_scheduler(layout: str, scheduler: str) -> Violation | None:
    """How many tiles packed sequences have is known on the device only, by those who draw them, or shares of them."""
    if (layout == "dense" and scheduler != "even") or (layout != "dense" and scheduler in ("dynamic", "even")):
        return None
    if scheduler == "stream_k":
        if layout == "packed":
            return None
        return Violation(
            "scheduler",
            f"shares of the last wave of {layout} sequences are not rendered; use dynamic or even, or layout packed",
        )
    if layout == "dense":
        return Violation(
            "scheduler",
            "even shares are found on the device, and of dense tensors the host knows them; use grid with split, or "
            "layout packed or paged",
        )
    return Violation(
        "scheduler",
        f"{scheduler} takes tiles that are known when the kernel starts, and of {layout} sequences only the device "
        "knows the lengths; use dynamic with schedule warp_specialized or ping_pong (extend k5 or k6), or layout dense",
    )


@rule(kind=GENERATOR, topic="q order")
def packed_shares(field: str, value: object, values: Sequence[object]) -> Violation | None:
    """Of packed sequences the last wave is shared where a tile has one query head, and scores are nothing but scaled.

    That is where it was measured to pay; parts lie in memory by the number of their share, as many as there are SMs.
    """
    if value in values:
        return None
    allowed = " or ".join(yaml(each) for each in values)
    return Violation(
        field, f"with layout packed, stream_k is rendered with {field}: {allowed} only; use that, or scheduler dynamic"
    )


@rule(kind=GENERATOR, topic="q order")
def order_of_packed(order: str, layout: str, scheduler: str) -> Violation | None:
    """Tiles may come in another order where a warp looks through sequences for the tile of a number drawn."""
    if order == "by_sequence" or (layout != "dense" and scheduler == "dynamic"):
        return None
    return Violation(
        "order",
        f"{order} is rendered for packed sequences and pages with scheduler dynamic, not for layout {layout} with "
        f"{scheduler}; use by_sequence, or layout packed with scheduler dynamic",
    )


@rule(kind=GENERATOR, topic="q order")
def order_woven(order: str, kind: str, mask: str, group: str, *, bare: bool) -> Violation | None:
    """Rows that a sequence lacks are left out where the loops over keys end at a diagonal, and no one's turn is due."""
    legal = (kind, mask) == ("warp_specialized", "causal") and group in ("multiple", "any") and bare
    if order != "woven" or legal:
        return None
    return Violation(
        "order",
        "woven is rendered with schedule warp_specialized, mask causal and tile.group: multiple or any, of 16 bits, "
        "with one level of sums and softmax.row_max: online; use these, or by_head",
    )


@rule(kind=GENERATOR, topic="schedule")
def packed_overlap(layout: str, overlap: bool) -> Violation | None:
    """Consumers of packed sequences are rendered with products beside the softmax, which is faster."""
    if layout == "dense" or overlap:
        return None
    return Violation(
        "schedule.overlap", f"layout {layout} is rendered with overlap: true only; use that, or layout dense"
    )


@rule(kind=GENERATOR, topic="output")
def packed_output(layout: str, lse: bool, o_dtype: str, dtype: AttentionDType) -> Violation | None:
    """O of packed sequences is in the dtype of q, or bf16 beside one of 8 bits, and LSE can be asked for."""
    usual = usual_output(dtype)
    if layout == "dense" or (lse and o_dtype == usual):
        return None
    field, needed = ("outputs.lse", "true") if not lse else ("o.dtype", usual)
    return Violation(field, f"layout {layout} is rendered with {field}: {needed} only; use that, or layout dense")


@rule(kind=GENERATOR, topic="softmax")
def rescale_overlap(rescale_above: int | None, overlap: bool) -> Violation | None:
    """Rescaling now and then is rendered where O is rescaled apart from the softmax, beside which P V runs."""
    if overlap or rescale_above is None:
        return None
    return Violation(
        "softmax.rescale_above",
        "rescaling now and then is rendered with overlap: true only; use null, or a schedule with overlap: true",
    )


@rule(kind=HARDWARE, topic="softmax")
def unbounded_scores(row_max: str, softcap: bool, dtype: str) -> Violation | None:
    """Where a maximum may be exceeded scores have to be bounded, and P must hold 2^86, as float16 does not."""
    if row_max == "online" or (softcap and dtype == "bf16"):
        return None
    if not softcap:
        problem = "scores without a cap may exceed a first maximum by any size; use softcap: true, or row_max: online"
    else:
        problem = (
            f"relative to a first maximum P may be 2^{MOST_EXPONENT}, and {dtype} ends before; use row_max: online"
        )
    return Violation("softmax.row_max", problem)


@rule(kind=GENERATOR, topic="softmax")
def first_maximum(
    row_max: str, overlap: bool, rescale_above: int | None, sink: bool, scheduler: str
) -> Violation | None:
    """A softmax with one maximum is rendered with products beside it, without sinks and parts, which need the last."""
    if row_max == "online":
        return None
    if rescale_above is not None:
        return Violation("softmax.rescale_above", "row_max: first never rescales O; use null, or row_max: online")
    if overlap and not sink and scheduler != "stream_k":
        return None
    needed = "with overlap: true" if not overlap else "without sinks" if sink else f"with schedulers but {scheduler}"
    return Violation("softmax.row_max", f"row_max: first is rendered {needed} only; use row_max: online")


@rule(kind=GENERATOR, topic="softmax")
def exp_before_wait(exponentials: int | None, kv: int, overlap: bool) -> Violation | None:
    """Where P V runs beside the softmax, its wait is held back among the exponentials of the first row.

    A thread has kv / 4 of them (PTX ISA, wgmma accumulator fragment).
    """
    if exponentials is None:
        return None
    if not overlap:
        return Violation(
            "softmax.exp_before_wait",
            "without overlap no P V runs beside the exponentials; use null or a schedule with overlap: true",
        )
    if exponentials <= kv // 4:
        return None
    return Violation(
        "softmax.exp_before_wait",
        f"{exponentials} > {kv // 4}, a thread's exponentials of one row with tile.kv {kv}; use at most {kv // 4}",
    )


@rule(kind=GENERATOR, topic="softmax")
def score_fields(field: str, pv_engine: str, kind: str, overlap: bool) -> Violation | None:
    """What changes the scores, or adds one to a row, is rendered for the kernels that models run, and for K4."""
    if pv_engine != "wgmma":
        return Violation(field, f"{field} needs wgmma for qk and pv, got pv {pv_engine}; leave it out, or extend k4_2")
    if kind == "cooperative" or overlap:
        return None
    return Violation(field, f"{field} is rendered with overlap: true only for {kind}; use that, or leave it out")


@rule(kind=GENERATOR, topic="softmax")
def mask_end(when: str, mask: str, overlap: bool) -> Violation | None:
    """A branch around the mask of the last tile of keys is rendered where nothing but the end of the keys needs one."""
    if when == "always":
        return None
    if not overlap:
        return Violation(
            "softmax.mask_end",
            "without overlap the last tile of keys is masked only when the end cuts it anyway; leave mask_end out, or "
            "use a schedule with overlap: true",
        )
    if mask == "none":
        return None
    return Violation(
        "softmax.mask_end",
        f"the last tile of keys that a row visits holds an edge of the {mask} mask as well; use mask_end: always",
    )
