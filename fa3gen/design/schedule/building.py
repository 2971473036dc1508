"""The schedule of a spec: its roles, rings and named barriers; the steps come from the two families of kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from fa3gen.design import footprint, tile_order
from fa3gen.design.schedule import combining, cooperative, copying, gemm, quantizing, specialized
from fa3gen.design.schedule.model import NamedBarrier, Ring, Role, Schedule, Step
from fa3gen.hardware import hopper
from fa3gen.spec.model import (
    CausalMask,
    Combine,
    Copy,
    CpAsyncLoad,
    Forward,
    Gemm,
    GlobalHandoff,
    NoMask,
    PingPongSchedule,
    Quantize,
    SmemHandoff,
    Spec,
    SyncLoad,
    TmaLoad,
    WgmmaProduct,
)

OUTPUT_BARRIER, TURN_BARRIER = 1, 2  # numbers of named barriers; turns are numbered on by consumer


def schedule_of(spec: Spec) -> Schedule:
    """Derive the schedule of a checked spec."""
    match spec:
        case Forward():
            return _of_forward(spec)
        case Gemm():
            return gemm.schedule_of(spec)
        case Copy():
            return copying.schedule_of(spec)
        case Combine():
            return combining.schedule_of(spec)
        case Quantize():
            return quantizing.schedule_of(spec)


def _of_forward(spec: Forward) -> Schedule:
    if isinstance(spec.handoff, GlobalHandoff):
        return _three_kernels(spec)
    if footprint.specialized(spec):
        roles = _specialized_roles(spec)
        return Schedule(roles, _specialized_rings(spec), _specialized_barriers(spec), specialized.steps(spec, roles))
    return Schedule((_all_warps(spec),), _cooperative_rings(spec), _cooperative_barriers(spec), cooperative.steps(spec))


def full_tiles(spec: Forward) -> Literal["all", "before", "between", "none"]:
    """Which tiles of keys hold no edge of the mask: all but the first visited, those before it or between, or none."""
    if isinstance(spec.mask, NoMask):
        return "all"
    if isinstance(spec.mask, CausalMask):
        return "before"
    if spec.mask.left is None or spec.mask.right is None:
        return "between"  # or none, as calls have it: each edge has a loop, and so have the tiles between
    # The last row of a tile of queries sees keys from its diagonal - left on, the first one up to its own + right. As
    # many keys in between fill a tile of keys, or else no tile is full; and then, and only then, one has both edges.
    wide = spec.mask.left + spec.mask.right + 2 - tile_order.positions(spec) >= spec.tile.kv
    return "between" if wide or not footprint.overlapped(spec) else "none"


# k1


def _three_kernels(spec: Forward) -> Schedule:
    warps = footprint.threads(spec) // hopper.WARP
    lse = ", and LSE" if spec.outputs.lse else ""
    kernels = {
        "scores": ("S = scale Q K^T", "-inf where the mask hides the key"),
        "softmax": ("P = softmax(S)", f"in place{lse}"),
        "output": ("O = P V", ""),
    }
    roles = tuple(Role(name, name, warps, what, f"{name}_kernel") for name, (what, _) in kernels.items())
    steps = tuple(Step(name, "kernel", "kernel", what, note=note) for name, (what, note) in kernels.items())
    return Schedule(roles, (), (), steps)


# Cooperative kernels


def _all_warps(spec: Forward) -> Role:
    warps = footprint.computing_threads(spec) // hopper.WARP
    return Role(cooperative.WARPS, "all warps", warps, "load and multiply", "attention_kernel")


def _tile_bytes(spec: Forward) -> tuple[int, int, int]:
    """Of a tile of Q, of K and of V."""
    problem, column = spec.problem, spec.tile.kv * spec.kv_element.bytes
    q = spec.tile.q * problem.head_dim * spec.element.bytes
    return q, problem.head_dim * column, problem.v_dim * column


def _cooperative_rings(spec: Forward) -> tuple[Ring, ...]:
    who, readers = cooperative.WARPS, (cooperative.WARPS,)
    if isinstance(spec.load, SyncLoad):
        return (Ring("q", ("Q",), 1, "threads", who, readers), Ring("kv", ("K", "V"), 1, "threads", who, readers))
    if isinstance(spec.load, CpAsyncLoad):
        stages = spec.load.kv_stages
        return (
            Ring("q", ("Q",), 1, "cp.async", who, readers),
            Ring("kv", ("K", "V"), stages, "cp.async", who, readers),
        )
    q, k, v = _tile_bytes(spec)
    stages, warps = spec.load.kv_stages, _all_warps(spec).warps
    first = Ring(
        "q", ("Q",), 1, "TMA", who, readers, (q,)
    )  # a CTA has one tile of queries: nobody gives Q's place back
    if spec.load.barrier == "shared":
        return first, Ring("kv", ("K", "V"), stages, "TMA", who, readers, (k, v), empty_arrivals=warps)
    return (
        first,
        Ring("k", ("K",), stages, "TMA", who, readers, (k,), empty_arrivals=warps),
        Ring("v", ("V",), stages, "TMA", who, readers, (v,), empty_arrivals=warps),
    )


def _cooperative_barriers(spec: Forward) -> tuple[NamedBarrier, ...]:
    if not isinstance(spec.handoff, SmemHandoff):
        return ()
    note = "the warps of one warpgroup: its rows of P are in shared memory"
    return (NamedBarrier("of P", 1, spec.tile.warpgroups or 0, hopper.WARPGROUP, note),)


# Warp-specialised kernels


def _specialized_roles(spec: Forward) -> tuple[Role, ...]:
    warps = footprint.computing_threads(spec) // hopper.WARP
    overlap = footprint.overlapped(spec)
    loops = {"all": (False,), "before": (True, False), "between": (True, False, True), "none": (True,)}
    return (
        *_producers(spec, warps),
        *_finder(spec, warps + (1 if footprint.loads_together(spec) else 2)),
        *_transposers(spec, warps + (footprint.WARPGROUP_WARPS if footprint.transposing_warpgroups(spec) else 2)),
        *_converters(spec, warps + footprint.WARPGROUP_WARPS),
        Role(
            specialized.CONSUMERS,
            "consumers",
            warps,
            "multiply",
            "consume",
            loops=loops[full_tiles(spec)] if overlap else (True,),
            peeled=int(overlap),
        ),
    )


def _producers(spec: Forward, warp: int) -> tuple[Role, ...]:
    """Who copies Q, K and V; `warp` is the first of them."""
    if footprint.loads_together(spec):
        return (Role(specialized.Q_K, f"warp {warp}", 1, "copies Q, K and V", "load_q_k_and_v"),)
    return (*_producers_of_q_and_k(spec, warp), Role(specialized.V, f"warp {warp + 1}", 1, "copies V", "load_v"))


def _producers_of_q_and_k(spec: Forward, warp: int) -> tuple[Role, ...]:
    """Who copies Q and K; `warp` is the first of the producers."""
    if spec.scheduler == "grid":
        return (
            Role(specialized.FIRST, "warp 0", 1, "copies Q and the first K", "load_first", loops=()),
            Role(specialized.Q_K, f"warp {warp}", 1, "copies K", "load_k", peeled=1),
        )
    draws = "draws the tiles and " if spec.scheduler == "dynamic" and not footprint.packed_sequences(spec) else ""
    peeled = int(footprint.keys_free_q(spec))
    return (Role(specialized.Q_K, f"warp {warp}", 1, f"{draws}copies Q and K", "load_q_and_k", peeled=peeled),)


def _finder(spec: Forward, warp: int) -> tuple[Role, ...]:
    """Who draws tiles and looks where they lie, of packed sequences."""
    if not footprint.packed_sequences(spec):
        return ()
    return (Role(specialized.TILES, f"warp {warp}", 1, "finds the tiles", "find_tiles", loops=()),)


def _transposers(spec: Forward, warp: int) -> tuple[Role, ...]:
    """Who makes V transposed of what was loaded; `warp` is the first of them."""
    if not footprint.transposes(spec):
        return ()
    count = spec.tile.transposers
    return (Role(specialized.TRANSPOSERS, _warps(warp, count), count, "transpose V", "transpose_v"),)


def _converters(spec: Forward, warp: int) -> tuple[Role, ...]:
    """Who makes operands of what was loaded; `warp` is the first of their warpgroup."""
    if not footprint.converts(spec):
        return ()
    count = footprint.converting_warps(spec)
    first = {specialized.K_CONVERTERS: ("K", warp), specialized.V_CONVERTERS: ("V", warp + count)}
    return tuple(
        Role(name, _warps(begin, count), count, f"convert {what}", f"convert_{what.lower()}")
        for name, (what, begin) in first.items()
    )


def _warps(first: int, count: int) -> str:
    return f"warps {first} {'and' if count == 2 else 'to'} {first + count - 1}"


def _specialized_rings(spec: Forward) -> tuple[Ring, ...]:
    assert isinstance(spec.load, TmaLoad)
    (q, k, v), stages = _tile_bytes(spec), spec.load.kv_stages
    warps, readers = footprint.computing_threads(spec) // hopper.WARP, (specialized.CONSUMERS,)
    first = specialized.FIRST if spec.scheduler == "grid" else specialized.Q_K
    released = 0 if footprint.keys_free_q(spec) else warps
    rings = [
        Ring("q", ("Q",), spec.load.q_stages, "TMA", first, readers, (q,), empty_arrivals=released),
        Ring("k", ("K",), stages, "TMA", specialized.Q_K, readers, (k,), empty_arrivals=warps),
        Ring("v", ("V",), stages, "TMA", specialized.who_loads_v(spec), readers, (v,), empty_arrivals=warps),
    ]
    if footprint.transposes(spec):
        count = spec.tile.transposers
        rings[2] = replace(rings[2], consumers=(specialized.TRANSPOSERS,), empty_arrivals=count)
        made = Ring("vt", ("Vt",), stages, "threads", specialized.TRANSPOSERS, readers)
        rings.append(replace(made, full_arrivals=count, empty_arrivals=warps))
    if footprint.converts(spec):
        rings[1:] = _stored_and_converted(spec, warps)
    if footprint.gathered(spec):  # of such a ring every thread gives a stage back
        facts: dict[str, Any] = {"filled_by": "cp.async", "sizes": (), "full_arrivals": 1}
        for i, ring in enumerate(rings[1:], 1):
            if ring.filled_by == "TMA":
                rings[i] = replace(ring, **facts, empty_arrivals=ring.empty_arrivals * hopper.WARP)
    if footprint.tells_tiles(spec):
        packed = footprint.packed_sequences(spec)
        drawing = specialized.TILES if packed else specialized.Q_K
        loading = (specialized.Q_K, specialized.V) if packed else (specialized.V,)
        loading = loading[:1] if footprint.loads_together(spec) else loading
        converting = (specialized.K_CONVERTERS, specialized.V_CONVERTERS) if footprint.converts(spec) else ()
        transposing = (specialized.TRANSPOSERS,) * footprint.transposes(spec)
        readers = (*loading, *converting, *transposing, *readers)
        tiles = Ring("tile", ("the next tile",), footprint.tile_slots(spec), "threads", drawing, readers)
        told = warps + len(loading) + footprint.converting_warps(spec) * len(converting)
        told += spec.tile.transposers * len(transposing)
        rings.append(replace(tiles, full_arrivals=1, empty_arrivals=told))
    return tuple(rings)


def _stored_and_converted(spec: Forward, warps: int) -> list[Ring]:
    """The rings of K and V in 8 bits, and those of the tiles that are made of them, for so many warps that multiply."""
    assert isinstance(spec.load, TmaLoad)
    count, stages, rings = footprint.converting_warps(spec), spec.load.kv_stages, []
    elements = {"K": spec.tile.kv * spec.problem.head_dim, "V": spec.tile.kv * spec.problem.v_dim}
    who = {"K": (specialized.Q_K, specialized.K_CONVERTERS), "V": (specialized.V, specialized.V_CONVERTERS)}
    for what, (loading, converting) in who.items():
        name, size = what.lower(), elements[what] * spec.kv_element.bytes
        stored = Ring(f"{name}8", (what,), spec.kv.stages, "TMA", loading, (converting,), (size,))
        made = Ring(name, (f"{what}16",), stages, "threads", converting, (specialized.CONSUMERS,))
        rings.append(replace(stored, empty_arrivals=count))
        rings.append(replace(made, full_arrivals=count, empty_arrivals=warps * hopper.WARP))
    return rings


def _specialized_barriers(spec: Forward) -> tuple[NamedBarrier, ...]:
    barriers, consumers = [], spec.tile.warpgroups or 0
    if isinstance(spec.pv, WgmmaProduct) and spec.outputs.o == "over_q":
        note = "all consumers: Q has been read; then: O is in shared memory"
        barriers.append(NamedBarrier("OUTPUT_BARRIER", OUTPUT_BARRIER, 1, consumers * hopper.WARPGROUP, note))
    if footprint.by_warps(spec):
        note = "all consumers: O of the tile before has been merged; then: O of all warps is there"
        barriers.append(NamedBarrier("MERGE_BARRIER", OUTPUT_BARRIER, 1, consumers * hopper.WARPGROUP, note))
    if isinstance(spec.schedule, PingPongSchedule):
        note = "each consumer -> the next one: it may issue its products"
        barriers.append(NamedBarrier("TURN_BARRIER", TURN_BARRIER, consumers, 2 * hopper.WARPGROUP, note))
    return tuple(barriers)
