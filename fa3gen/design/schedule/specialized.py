"""The steps of warp-specialised kernels: two warps load, other warpgroups multiply, all walk through the same tiles.

Where packed sequences have to be looked through for a tile, a third warp does that, ahead of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from fa3gen.design import footprint, splits
from fa3gen.design.masks import given_with_calls
from fa3gen.design.schedule.model import Place, Role, Step
from fa3gen.spec.model import Forward, NoMask, PingPongSchedule

FIRST, Q_K, V, CONSUMERS = "producer of the first tiles", "producer of Q, K", "producer of V", "consumers"
TILES = "who finds the tiles"
TRANSPOSERS = "transposers"
K_CONVERTERS, V_CONVERTERS = "converters of K", "converters of V"
OUTPUT_BARRIER, MERGE_BARRIER = "OUTPUT_BARRIER", "MERGE_BARRIER"

_consumers = partial(Step, CONSUMERS)


def steps(spec: Forward, roles: Sequence[Role]) -> tuple[Step, ...]:
    """The steps of all roles, one role after the other."""
    drawing = next((role.label for role in roles if role.name == TILES), roles[0].label)
    consume = _overlapped if footprint.overlapped(spec) else _by_warps if footprint.by_warps(spec) else _sequential
    produce = _produce_first_and_k if spec.scheduler == "grid" else _produce_q_and_k
    find = _find(spec) if footprint.packed_sequences(spec) else ()
    made = _transpose(spec, drawing) if footprint.transposes(spec) else _convert(spec, drawing)
    produce_v = () if footprint.loads_together(spec) else _produce_v(spec, drawing)
    return (*produce(spec, drawing), *produce_v, *find, *made, *consume(spec, drawing))


def who_loads_v(spec: Forward) -> str:
    """The role that copies V."""
    return Q_K if footprint.loads_together(spec) else V


# Producers


def _produce_first_and_k(spec: Forward, drawing: str) -> Iterator[Step]:
    first = partial(Step, FIRST, "cta")
    yield first("announce", "Q")
    yield first("load", "Q", "q", note="by TMA, before the other warps may touch a barrier")
    yield first("wait_empty", on="k")
    yield first("load", "K", "k", note="by TMA, of the first step")
    yield Step(Q_K, "step", "wait_empty", on="k")
    yield Step(Q_K, "step", "load", "K", "k", note="by TMA, of a step other than the first, when a stage is free")


def _produce_q_and_k(spec: Forward, drawing: str) -> Iterator[Step]:
    step = partial(Step, Q_K)
    if spec.scheduler == "even":
        yield from _first(spec, Q_K, drawing)
    elif footprint.packed_sequences(spec):
        yield step("cta", "wait_full", on="tile", note=f"the one that {drawing} has found")
    if footprint.keys_free_q(spec):
        yield from _load_keys(spec, Q_K, "tile")
        yield step("tile", "wait_read", on="k", ahead=-1)
        yield step("tile", "announce", "Q")
        yield step("tile", "load", "Q", "q", note="by TMA, in the place of the one before")
    else:
        yield step("tile", "wait_empty", on="q")
        yield step("tile", "load", "Q", "q", note="by TMA, when its place is free")
    yield from _load_keys(spec, Q_K, "step")
    if footprint.loads_together(spec):
        yield from _load_keys(spec, Q_K, "step", "V")
    yield from _tell_last_keys(spec, Q_K)
    if footprint.drawn_sequences(spec):
        yield step("end", "release", on="tile", note="K is on its way: it is time to draw")
        yield step("end", "wait_full", on="tile", note=f"the one that {drawing} has found")
        return
    if spec.scheduler != "dynamic":
        yield from _next(spec, Q_K, drawing)
        return
    yield step("end", "draw", note="the next tile; the first is the CTA's number")
    yield step("end", "wait_empty", on="tile")
    yield step("end", "fill", on="tile", note="tells all other warps which one it is")


def _load_keys(spec: Forward, who: str, place: Place, what: str = "K") -> Iterator[Step]:
    """Copy a tile of K, or of V, into its ring."""
    step, note = partial(Step, who, place), _note_on_keys(spec, what, place)
    ring = f"{what.lower()}8" if footprint.converts(spec) else what.lower()
    yield step("wait_empty", on=ring)
    if footprint.gathered(spec):
        yield step("load", what, ring, note=f"by cp.async, row by row, {note}")
        if footprint.loads_together(spec) and what == "K":
            return  # V of the same keys lands with it
        if footprint.gathered_ahead(spec) == 1:
            yield step("commit")
            shown = "" if footprint.converts(spec) else ", and a fence shows it to wgmma"
            yield from _tell_keys(spec, who, place, f"it has landed{shown}")
        elif place == "tile":
            yield step("commit", note="it is told with the next one")
        else:
            yield step("commit")
            shown = "" if footprint.converts(spec) else "; a fence shows it"
            yield from _tell_keys(spec, who, place, f"the one before has landed{shown}", ahead=-1)
    elif footprint.paged(spec):
        yield step("load", what, ring, note=f"by TMA, boxes of {footprint.page_rows(spec)} keys, {note}")
    else:
        yield step("load", what, ring, note=f"by TMA, {note}")


def _tell_last_keys(spec: Forward, who: str) -> Iterator[Step]:
    """Where a tile is told when the next one has been asked for, the last one is told here."""
    if footprint.gathered_ahead(spec) > 1:
        yield from _tell_keys(spec, who, "end", "so has the last one")


def _tell_keys(spec: Forward, who: str, place: Place, note: str, *, ahead: int = 0) -> Iterator[Step]:
    """Wait for the copies of a tile, and have the consumers, or those that convert it, know."""
    what = "V" if who == V else "K"
    ring = f"{what.lower()}8" if footprint.converts(spec) else what.lower()
    yield Step(who, place, "wait_copies", what, ahead=ahead)
    yield Step(who, place, "fill", on=ring, ahead=ahead, note=note)
    if footprint.loads_together(spec):
        yield Step(who, place, "wait_copies", "V", ahead=ahead)
        yield Step(who, place, "fill", on="v", ahead=ahead, note="so has V of the same keys")


def _note_on_keys(spec: Forward, what: str, place: Place) -> str:
    """When a tile of K is loaded, or what V has behind the keys; in fewer words where pages are spoken of before."""
    if footprint.paged(spec):
        return "when free" if what == "K" else "zeros behind all"
    if place == "tile":
        return "of the first step"
    zeros = "; behind the keys zeros" if what == "V" and footprint.packed_sequences(spec) else ""
    if footprint.eight_bit_cache(spec) or footprint.loads_together(spec):
        return f"when free{zeros}"
    return f"when a stage is free{zeros}"


def _find(spec: Forward) -> tuple[Step, ...]:
    """Who looks where tiles of packed sequences lie."""
    if spec.scheduler == "even":
        return _FIND_SHARE
    return _FIND_OR_SHARE if footprint.shares_packed(spec) else _FIND


_FIND = (
    Step(TILES, "cta", "wait_empty", on="tile"),
    Step(TILES, "cta", "fill", on="tile", note="where the tile with the CTA's number lies"),
    Step(TILES, "tile", "wait_empty", on="tile"),
    Step(TILES, "tile", "draw", note="the next tile, when K of this one is on its way"),
    Step(TILES, "tile", "fill", on="tile", note="where it lies"),
)


_FIND_OR_SHARE = (
    Step(TILES, "tile", "wait_empty", on="tile"),
    Step(TILES, "tile", "draw", note="a tile or share, when K of the last is on its way"),
    Step(TILES, "tile", "fill", on="tile", note="where it lies, or the next piece of the share"),
)


_FIND_SHARE = (
    Step(TILES, "tile", "wait_empty", on="tile"),
    Step(TILES, "tile", "fill", on="tile", note="the next tile of this CTA's share of all"),
    Step(TILES, "exit", "wait_empty", on="tile"),
    Step(TILES, "exit", "fill", on="tile", note="there is no other"),
)


def _produce_v(spec: Forward, drawing: str) -> Iterator[Step]:
    yield from _first(spec, V, drawing)
    yield from _load_keys(spec, V, "step", "V")
    yield from _tell_last_keys(spec, V)
    yield from _next(spec, V, drawing)


def _transpose(spec: Forward, drawing: str) -> Iterator[Step]:
    """Tiles of V become those that P V reads, in the order in which they are loaded."""
    step = partial(Step, TRANSPOSERS, "step")
    yield from _first(spec, TRANSPOSERS, drawing)
    yield step("wait_full", on="v")
    yield step("wait_empty", on="vt")
    yield step("transpose", "V", note="by ldmatrix, prmt, stmatrix; keys in P's order")
    yield step("release", on="v")
    yield step("fill", on="vt", note="V has been read; a fence for wgmma")
    yield from _next(spec, TRANSPOSERS, drawing)


def _v_ring(spec: Forward) -> str:
    """Where consumers find V."""
    return "vt" if footprint.transposes(spec) else "v"


def _bits(spec: Forward) -> str:
    return f"in {spec.element.bits} bits"


def _convert(spec: Forward, drawing: str) -> Iterator[Step]:
    """Tiles of 8 bits become those that are multiplied, in the order in which they are loaded."""
    if not footprint.converts(spec):
        return
    for who, ring in ((K_CONVERTERS, "k"), (V_CONVERTERS, "v")):
        yield from _first(spec, who, drawing)
        yield Step(who, "step", "wait_full", on=f"{ring}8")
        yield Step(who, "step", "wait_empty", on=ring)
        yield Step(who, "step", "convert", note="to 16 bits, swizzled as wgmma reads them")
        yield Step(who, "step", "release", on=f"{ring}8")
        yield Step(who, "step", "fill", on=ring, note="a fence shows the tile to wgmma")
        yield from _next(spec, who, drawing)


def _first(spec: Forward, who: str, drawing: str) -> Iterator[Step]:
    """How a role that does not draw gets to know its first tile, where that is not the CTA's number."""
    if footprint.packed_sequences(spec):
        yield Step(who, "cta", "wait_full", on="tile")
        yield Step(who, "cta", "release", on="tile", note=f"the one that {drawing} has found")


def _next(spec: Forward, who: str, drawing: str = "") -> Iterator[Step]:
    """How a role that does not draw gets to know its next tile."""
    if footprint.tells_tiles(spec):
        yield Step(who, "end", "next")
        yield Step(who, "end", "wait_full", on="tile")
        how = "found" if spec.scheduler == "even" else "drawn"
        yield Step(who, "end", "release", on="tile", note=f"the one that {drawing} has {how}")
        return
    note = {
        "single_tile": "there is none: a CTA has one tile",
        "grid": "there is none: a CTA has one tile",
        "static": "dealt out in turn",
        "stream_k": "dealt out in turn, then a share of the last wave",
    }[spec.scheduler]
    yield Step(who, "end", "next", note=note)


# Consumers

_UNSEEN = "tiles of keys that only rows of others see"


class _Turns:
    """Steps that only ping-pong has."""

    def __init__(self, spec: Forward) -> None:
        self.used = isinstance(spec.schedule, PingPongSchedule)

    def take(self, place: Place) -> Iterator[Step]:
        if self.used:
            yield _consumers(place, "wait_turn")

    def give(self, place: Place, note: str = "") -> Iterator[Step]:
        if self.used:
            yield _consumers(place, "pass_turn", note=note)

    def first(self) -> Iterator[Step]:
        if self.used:
            yield _consumers("cta", "pass_turn", only="last", note="the first turn is consumer 0's")

    def last(self) -> Iterator[Step]:
        if self.used:
            yield _consumers("exit", "wait_turn", only="first", note="no arrival is left in the barrier")


def _sequential(spec: Forward, drawing: str) -> Iterator[Step]:
    """No product runs beside the softmax of the same warpgroup."""
    turns, step = _Turns(spec), partial(_consumers, "step")
    yield from _first(spec, CONSUMERS, drawing)
    yield from turns.first()
    yield _consumers("tile", "wait_full", on="q", note="Q has landed")
    yield step("wait_full", on="k")
    yield from turns.take("step")
    yield step("product", "S", note="by wgmma")
    yield step("wait_products")
    yield step("release", on="k", note="S is complete, K has been read")
    yield from turns.give("step", "the softmax comes next")
    yield step("mask", note="boundary tiles only")
    yield step("softmax")
    yield step("round", note="P = 2^(S - max), in 16 bits; O and sums rescaled")
    yield step("wait_full", on="v")
    yield step("product", "O", note="by wgmma")
    yield step("wait_products")
    yield step("release", on="v", note="O is complete, V has been read")
    yield _consumers("end", "release", on="q", note="Q has been read")
    yield from _store(spec)
    yield from _next(spec, CONSUMERS, drawing)
    yield from turns.last()
    yield from _outlive(spec)


def _by_warps(spec: Forward, drawing: str) -> Iterator[Step]:
    """Each warp with keys of its own; products are synchronous, and shared memory is free when it has been read."""
    step, end = partial(_consumers, "step"), partial(_consumers, "end")
    yield from _first(spec, CONSUMERS, drawing)
    yield _consumers("tile", "wait_full", on="q")
    yield _consumers("tile", "read", "rQ", note="Q to registers, as A operand")
    yield _consumers("tile", "release", on="q", note="Q has been read, by a fence")
    yield step("wait_full", on="k")
    converts = footprint.eight_bit_cache(spec)
    yield step("read", "rK", note=f"of this warp's keys{', in 8 bits' * converts}, 16 bytes at a time")
    yield step("wait_full", on="v")
    yield step("read", "rV", note="the same of V, by ldmatrix, transposed")
    yield step("release", on="k")
    yield step("release", on="v", note="both are in registers, by a fence")
    if converts:
        yield step("convert", "K", note="K to 16 bits, as B operand")
    yield step("product", "S", note="by mma, of this warp's keys")
    yield step("mask", note="boundary tiles only")
    yield step("softmax", note="P = 2^(S - max); O and sums rescaled")
    yield step("round", note="P in 16 bits, as A operand")
    if converts:
        yield step("convert", "V", note="V to 16 bits, as B operand")
    yield step("product", "O", note="by mma, of this warp's keys")
    yield end("sync", on=MERGE_BARRIER, note="all have read what was there")
    yield end("gather", "sums", note="O, maxima and sums of each warp to shared memory")
    yield end("sync", on=MERGE_BARRIER, note="those of all warps are there")
    yield end("read", "sums", note="and added up, each with its weight")
    yield from _store(spec)
    yield from _next(spec, CONSUMERS, drawing)


def _overlapped(spec: Forward, drawing: str) -> Iterator[Step]:
    """S of a tile of keys is issued with P V of the one before, which runs on during the softmax."""
    turns, flattened = _Turns(spec), footprint.flattened(spec)
    yield from _first(spec, CONSUMERS, drawing)
    yield from turns.first()
    if footprint.block_scales(spec):
        yield _consumers("tile", "read_scale", note="q_descale, and k_descale of the first two steps")
        yield _consumers("tile", "read_scale", note="v_descale of the first step")
    if own := footprint.own_keys(spec):
        yield _consumers("cta" if flattened else "tile", "drop", on="k", note=_UNSEEN)
    yield from _first_scores(turns, "cta" if flattened else "tile")
    if own:
        yield _consumers("tile", "drop", on="v")
        yield _consumers("tile", "skip_turns", note="of the same")
    when = "with" if spec.softmax.mask_end == "always" else "if it holds"
    yield from _cap(spec, "tile")
    yield _consumers("tile", "mask", note=f"of the first step, {when} the end of the keys")
    yield _consumers("tile", "softmax")
    yield _consumers("tile", "round", note=f"{_exponentials(spec)}, {_bits(spec)}")
    yield from _overlapped_step(spec, turns)
    if footprint.block_scales(spec):
        yield _consumers("step", "read_scale", note="k_descale of the next step")
        yield _consumers("step", "read_scale", note="v_descale of this step, from global memory")
    if footprint.skips_absent(spec):
        yield _consumers("end", "drop", on="k", note="all but the first, by a warpgroup without rows")
        yield _consumers("end", "drop", on="v", note="and all but the last")
    if left := own and given_with_calls(spec.mask):
        yield _consumers("end", "drop", on="k")
        yield _consumers("end", "skip_turns", note=_UNSEEN)
    if not footprint.keys_free_q(spec):
        yield _consumers("end", "release", on="q", note="Q has been read")
    yield from _next(spec, CONSUMERS, drawing)
    yield from _last_product(spec, turns, flattened)
    if left:
        yield _consumers("end", "drop", on="v", note="of those after the last")
    yield from _store(spec)
    if flattened:
        yield _consumers("end", "wait_products")
        yield _consumers("end", "release", on="k", ahead=1, note="the next tile's first S is complete")
    yield from turns.last()
    yield from _outlive(spec)


def _first_scores(turns: _Turns, place: Place) -> Iterator[Step]:
    """S of the tile of keys visited first, with nothing beside it."""
    step = partial(_consumers, place)
    yield step("wait_full", on="q", note="Q has landed")
    yield step("wait_full", on="k")
    yield from turns.take(place)
    yield step("product", "S", note="by wgmma, for the first step, alone")
    yield from turns.give(place)
    yield step("wait_products")
    yield step("release", on="k", note="S is complete, K has been read")


def _overlapped_step(spec: Forward, turns: _Turns) -> Iterator[Step]:
    if footprint.stripes(spec) > 1:
        yield from _striped_step(spec)
        return
    step, above, held_back = partial(_consumers, "step"), spec.softmax.rescale_above, spec.softmax.exp_before_wait
    yield step("wait_full", on="k")
    yield from turns.take("step")
    yield step("product", "S", note="by wgmma, of a step other than the first")
    yield step("wait_full", on=_v_ring(spec), ahead=-1)
    alone = {0: "", 1: ", alone"}.get(footprint.promote_every(spec), ", with those before")
    yield step("product", "O", ahead=-1, note=f"by wgmma, of the step before{alone}")
    yield step("wait_products", in_flight=1)
    yield from turns.give("step")
    yield step("release", on="k", note="S is complete, P V runs on")
    yield from _cap(spec, "step")
    if not isinstance(spec.mask, NoMask):
        yield step("mask", note="boundary tiles only")
    yield step("softmax", note=f"{_exponentials(spec)} and sums")
    yield step("wait_products")
    first = "" if held_back is None else f"; after {held_back} exponentials a thread"
    done = "P V is complete" if footprint.two_levels(spec) else "O is complete"
    yield step("release", on=_v_ring(spec), ahead=-1, note=f"{done}{first}")
    if footprint.promote_every(spec) > 1:
        every = footprint.promote_every(spec)
        yield step("promote", note=f"every {every} steps: their P V added to O, in float32")
        yield step("rescale", note="in the others: P V of those since to the new maxima")
        yield step("round", note=f"P {_bits(spec)}")
        return
    if footprint.two_levels(spec):
        yield step("promote", note="O to the last step's maxima, its P V added")
        yield step("round", note=f"P {_bits(spec)}")
        return
    moves = spec.softmax.row_max == "online"
    if spec.softmax.restart_every is not None:
        yield step("add_part", note=f"every {spec.softmax.restart_every} keys: O to the sums of all, in float32")
    if moves:
        yield step("rescale", note="" if above is None else f"O, where a maximum has grown by more than 2^{above}")
    yield step("round", note=f"{'O to the new maxima; ' * (moves and above is None)}P {_bits(spec)}")


def _striped_step(spec: Forward) -> Iterator[Step]:
    """P V of the step before, stripe by stripe, and S behind it, each while the one before it is added to O."""
    step, ring = partial(_consumers, "step"), _v_ring(spec)
    yield step("wait_full", on=ring, ahead=-1)
    yield from _stripes(spec, "step", ahead=-1)
    yield step("wait_full", on="k")
    yield step("product", "S", note="by wgmma, of a step other than the first")
    yield step("wait_products", in_flight=1)
    yield step("release", on=ring, ahead=-1, note="P V is complete, S runs on")
    yield step("promote", stripe=footprint.stripes(spec) - 1, note="the last stripe")
    yield step("wait_products")
    yield step("release", on="k", note="S is complete")
    yield from _cap(spec, "step")
    if not isinstance(spec.mask, NoMask):
        yield step("mask", note="boundary tiles only")
    yield step("softmax")
    yield step("round", note=f"{_exponentials(spec)} and sums; P {_bits(spec)}")


def _stripes(spec: Forward, place: Place, ahead: int) -> Iterator[Step]:
    """P V of each stripe of O, which is added while that of the next one runs."""
    step, which = partial(_consumers, place), "of the step before" if ahead else "of the last step"
    columns = footprint.promoted_columns(spec)
    yield step("product", "O", ahead=ahead, note=f"by wgmma, {which}, {columns} columns")
    for stripe in range(1, footprint.stripes(spec)):
        yield step("product", "O", ahead=ahead, stripe=stripe)
        yield step("wait_products", in_flight=1)
        added = "O to the last maxima, P V added" if stripe == 1 else "the same"
        yield step("promote", stripe=stripe - 1, note=added)


def _exponentials(spec: Forward) -> str:
    if footprint.eight_bits(spec):
        return f"P = 2^(S - max + {footprint.P_EXPONENT})"
    return "P = 2^(S - max)" if spec.softmax.row_max == "online" else "P = 2^(S - first max)"


def _cap(spec: Forward, place: Place) -> Iterator[Step]:
    if spec.softmax.softcap:
        yield _consumers(place, "cap", note="tanh(scale S / softcap)")


def _last_product(spec: Forward, turns: _Turns, flattened: bool) -> Iterator[Step]:
    """P V of the last tile of keys; where the next tile of queries is known and loaded, its first S runs beside."""
    end = partial(_consumers, "end")
    transposed = footprint.transposes(spec)
    landed = "the last V has been transposed" if transposed else "the last V has landed"
    yield end("wait_full", on=_v_ring(spec), note=landed)
    if flattened:
        if footprint.own_keys(spec):
            yield end("drop", on="k", note="of the next tile, before its first")
        yield end("wait_full", on="q", ahead=1)
        yield end("wait_full", on="k", ahead=1, note="so have the next tile's Q and first K")
    yield from turns.take("end")
    if spec.softmax.sink:
        where = "" if footprint.eight_bits(spec) or footprint.converts(spec) else " to the sums"
        yield end("read_sink", note=f"from global memory, added{where} while P V runs")
    if footprint.stripes(spec) > 1:
        yield from _stripes(spec, "end", ahead=0)
    else:
        yield end("product", "O", note="by wgmma, of the last step")
    if flattened:
        yield end("product", "S", ahead=1, note="by wgmma, of the next tile's first step")
    yield from turns.give("end")
    yield end("wait_products", in_flight=int(flattened))
    done = "P V is complete" if footprint.two_levels(spec) else "O is complete"
    yield end("release", on=_v_ring(spec), note=f"{done}{'; the next S runs on' * flattened}")
    if footprint.two_levels(spec):
        yield end("promote", stripe=footprint.stripes(spec) - 1, note="the last P V")
    if spec.softmax.restart_every is not None:
        yield end("add_part", note="the last one")


def _store(spec: Forward) -> Iterator[Step]:
    end = partial(_consumers, "end")
    if footprint.splits_tail(spec):
        giver = "share" if footprint.shares_packed(spec) else "CTA"
        yield end("add_part", note=f"if the {giver} before has begun this tile")
        yield end("give_part", note=f"to the next {giver} if it goes on; else:")
    if splits.whole_parts(spec):
        yield end("store", "sums", note="from registers, and maxima, of a part")
        yield end("store", "O", note="from registers, in float32, of a part")
        return
    if spec.split is not None:
        yield end("store", "LSE", note="from registers; of a part always")
        even = spec.scheduler == "even"
        how = "of a part in float32" if even else "16 bytes at a time; of a part 8, in float32"
        yield end("store", "O", note=f"from registers{';' if even else ','} {how}")
        return
    if spec.outputs.lse:
        yield end("store", "LSE", note="from registers, if asked for")
    if spec.outputs.o == "direct":
        yield end("store", "O", note="from registers, 16 bytes at a time")
    elif spec.outputs.o == "own_buffer":
        yield end("wait_stores")
        yield end("gather", "O")
        whose = "by warp, up to the last query" if footprint.packed_sequences(spec) else "each warp its own rows"
        whose = "up to the last query" if footprint.loads_together(spec) else whose
        yield end("store", "O", note=f"by stmatrix and TMA, {whose}")
    else:
        yield end("sync", "Q", OUTPUT_BARRIER)
        yield end("gather", "O")
        yield end("sync", on=OUTPUT_BARRIER, note="by stmatrix, in Q's place, when all have read Q")
        yield end("store", "O", only="first_warp")
        yield end("wait_stores", only="first_warp", note="by TMA; shared memory must outlive its reads")


def _outlive(spec: Forward) -> Iterator[Step]:
    if spec.outputs.o == "own_buffer":
        yield _consumers("exit", "wait_stores", note="shared memory must outlive the stores' reads")
