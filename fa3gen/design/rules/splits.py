"""Rules about keys in parts (flash decoding), and about tiles that hold all query heads of a kv head."""

from __future__ import annotations

from fa3gen.design.rules.registry import GENERATOR, Violation, rule
from fa3gen.hardware import hopper
from fa3gen.spec.model import AttentionDType, usual_output


@rule(kind=GENERATOR, topic="kv order")
def split_scheduler(scheduler: str, layout: str, group: str) -> Violation | None:
    """The grid places parts beside each other, of dense tensors, whose lengths the host knows, once for all heads.

    Of other sequences only the device knows the lengths: there all steps are shared out evenly.
    """
    if group not in ("at_most", "fitted"):
        return Violation("tile.group", "split is rendered with all heads of a kv head in a tile; use group: at_most")
    needed = "grid" if layout == "dense" else "even"
    if scheduler == needed:
        return None
    return Violation(
        "split",
        f"split of {layout} sequences is rendered with scheduler {needed}, not {scheduler}; use that, or leave it out",
    )


@rule(kind=GENERATOR, topic="q order")
def even_shares(scheduler: str, split: bool) -> Violation | None:
    """Equal shares of all steps end inside of tiles, wherever that is."""
    if scheduler != "even" or split:
        return None
    return Violation("scheduler", "even cuts tiles into parts of their keys; use dynamic, or split: {count: auto}")


@rule(kind=GENERATOR, topic="kv order")
def even_parts(scheduler: str, keys: int | None, ctas: int) -> Violation | None:
    """A CTA that has an even share of whole parts has an SM of its own."""
    if scheduler != "even" or keys is None or ctas == 1:
        return None
    return Violation(
        "tile.ctas_per_sm",
        f"even with parts of {keys} keys is rendered for a CTA on each SM, not {ctas}; use ctas_per_sm 1, or "
        "split: {count: auto}",
    )


@rule(kind=GENERATOR, topic="kv order")
def split_unit(count: str | None, keys: int | None) -> Violation | None:
    """The number of parts follows from the GPU, or from the length of one."""
    if (count is None) != (keys is None):
        return None
    if keys is None:
        return Violation("split", "split needs a number of parts, or of keys of each; use count: auto, or keys: 512")
    return Violation("split.keys", "parts of so many keys are as many as there are keys for; leave keys or count out")


@rule(kind=GENERATOR, topic="kv order")
def split_keys(keys: int, kv: int, rescale_above: int | None) -> Violation | None:
    """A row's bits depend on its own keys alone: parts begin with a tile, and no other row decides when it rescales."""
    if keys % kv:
        return Violation("split.keys", f"parts are whole tiles of {kv} keys; use a multiple of tile.kv, not {keys}")
    if rescale_above is not None:
        return Violation(
            "softmax.rescale_above",
            "with parts of so many keys a row's bits are its own, and whether a warp rescales now and then depends on "
            "all its rows; use null, or split: {count: auto}",
        )
    return None


@rule(kind=GENERATOR, topic="kv order")
def even_whole_parts(field: str, value: object, values: tuple[object, ...]) -> Violation | None:
    """Whole parts in even shares are added up by rows: of products of 16 bits, and of masks that begin with a key."""
    if value in values:
        return None
    allowed = " or ".join(map(str, values))
    return Violation(
        field, f"split.keys is rendered with scheduler even and {field}: {allowed} only; use that, or count: auto"
    )


@rule(kind=GENERATOR, topic="kv order")
def restarted_parts(keys: int, kv: int, rescale_above: int | None) -> Violation | None:
    """The same of parts that a CTA adds up itself."""
    if keys % kv:
        return Violation(
            "softmax.restart_every", f"parts are whole tiles of {kv} keys; use a multiple of tile.kv, not {keys}"
        )
    if rescale_above is not None:
        return Violation(
            "softmax.rescale_above",
            "what a row has of a part is to be its own, and whether a warp rescales now and then depends on all its "
            "rows; use null, or leave softmax.restart_every out",
        )
    return None


@rule(kind=GENERATOR, topic="kv order")
def restarted_kernel(field: str, value: object, values: tuple[object, ...]) -> Violation | None:
    """Where parts are added up by the CTA that has them all: packed sequences, whose lengths only the device knows."""
    if value in values:
        return None
    allowed = " or ".join(str(each).lower() if isinstance(each, bool) else str(each) for each in values)
    return Violation(
        field, f"softmax.restart_every is rendered with {field}: {allowed} only; use that, or leave restart_every out"
    )


@rule(kind=GENERATOR, topic="kv order")
def split_output(o: str, lse: bool, o_dtype: str, dtype: AttentionDType) -> Violation | None:
    """Parts are added up with their LSE; they leave the registers straight, as O does where there is one part."""
    if o != "direct":
        return Violation("outputs.o", f"split is rendered with outputs.o: direct only, not {o}; use that")
    if not lse:
        return Violation("outputs.lse", "parts are weighed by their LSE, so that a split kernel has it; use lse: true")
    if o_dtype != usual_output(dtype):
        usual = f"the dtype of q, or bf16 beside one of 8 bits, not {o_dtype}"
        return Violation("o.dtype", f"split is rendered with O in {usual}; leave o.dtype out")
    return None


@rule(kind=GENERATOR, topic="kv order")
def split_scores(mask: str, kv_from: str, sink: bool, row_max: str, scheduler: str) -> Violation | None:
    """Parts are of what a window shows, a sink enters once for all, and a first maximum differs between them."""
    if mask == "window" and scheduler != "even":
        return Violation(
            "mask", f"windows are rendered with split for scheduler even, not {scheduler}; leave split out"
        )
    if mask == "window" and kv_from != "window":
        needed = "else CTAs would share keys that nobody sees"
        return Violation("tile.kv_from", f"parts of a window are rendered with kv_from: window, {needed}; use that")
    if sink and scheduler != "even":
        where = f"sinks are rendered with split for scheduler even, not {scheduler}"
        return Violation("softmax.sink", f"{where}, where a sink would enter every part; leave sink or split out")
    if row_max != "online":
        return Violation("softmax.row_max", "split is rendered with row_max: online only; use that")
    return None


@rule(kind=GENERATOR, topic="structure")
def padded_heads(split: bool, pack_heads: int) -> Violation | None:
    """Rows of heads that do not exist are clipped by TMA where Q comes in, and by a comparison where parts go out."""
    if pack_heads == 1:
        return Violation("tile.group", "group: at_most needs room for several heads; use tile.pack_heads of 2 or more")
    if split:
        return None
    return Violation(
        "tile.group", "group: at_most is rendered with keys in parts only; add split: {count: auto}, or use multiple"
    )


@rule(kind=GENERATOR, topic="structure")
def fitted_heads(
    scheduler: str,
    mask: str,
    pack_heads: int,
    *,
    sink: bool,
    whole: bool,
    overlap: bool,
    from_window: bool,
) -> Violation | None:
    """Whoever finds tiles says of each how many heads it holds, and Q comes by the box that has as many.

    Steps are counted as rows see keys, see `counts_seen`, or as with at_most where warps have keys of their own.
    """
    if pack_heads & (pack_heads - 1):
        return Violation("tile.pack_heads", f"group: fitted takes powers of two, and {pack_heads} is none; use 8 or 16")
    if scheduler != "even" or whole:
        return Violation(
            "tile.group", "group: fitted is rendered with split: {count: auto} and scheduler even; use these"
        )
    if mask != "causal" or from_window:
        return Violation("tile.group", f"group: fitted is rendered with mask causal, not {mask}; use at_most")
    if sink or not overlap:
        return Violation(
            "tile.group", "group: fitted is rendered with overlap, or engine mma, and without sinks; use at_most"
        )
    return None


@rule(kind=GENERATOR, topic="structure")
def any_group(order: str, o: str, pack_heads: int, *, split: bool, sink: bool) -> Violation | None:
    """Whoever finds tiles in another order counts those of a kv head; rows of no head are left out where O goes out."""
    if order == "by_sequence":
        return Violation(
            "tile.group", f"group: any is rendered with order by_head or woven, not {order}; use one, or multiple"
        )
    if pack_heads == 1:
        return Violation("tile.group", "a tile of one head takes any group without it; leave tile.group out")
    if o != "direct":
        return Violation("outputs.o", f"group: any is rendered with outputs.o: direct only, not {o}; use that")
    if split or sink:
        field = "split" if split else "softmax.sink"
        return Violation(field, f"group: any is rendered without {field}; leave it out, or use group: multiple")
    return None


@rule(kind=GENERATOR, topic="kv order")
def rows_in_warps(v_dim: int) -> Violation | None:
    """The 8 warps of a CTA that adds up whole parts have whole rows, two columns to a lane."""
    if v_dim in (64, 128, 256, 512):
        return None
    return Violation(
        "problem.head_dim",
        f"whole parts are added up by warps with 64 columns each, 8 of a CTA, among which {v_dim} columns cannot be "
        "divided; use 64, 128 or 256, or count: auto",
    )


@rule(kind=GENERATOR, topic="kv order")
def combine_columns(v_dim: int) -> Violation | None:
    """A lane of the kernel that adds parts up has as many columns as all others of its warp."""
    if v_dim % hopper.WARP == 0:
        return None
    return Violation(
        "problem.head_dim",
        f"parts are added up by warps whose lanes have as many columns each, and {v_dim} columns are no multiple of "
        f"{hopper.WARP}; leave split out",
    )
