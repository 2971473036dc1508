"""Rules about which parts of a kernel go together."""

from __future__ import annotations

from fa3gen.design.rules.registry import GENERATOR, Violation, rule
from fa3gen.spec.model import WINDOW_MAX


@rule(kind=GENERATOR, topic="O = P V")
def engine_pair(qk_engine: str, pv_engine: str) -> Violation | None:
    """P of a scalar QK^T product is not in the layout that a WGMMA PV product reads; with mma each warp has both."""
    if (qk_engine == "mma") != (pv_engine == "mma"):
        field, other = ("qk.engine", qk_engine) if pv_engine == "mma" else ("pv.engine", pv_engine)
        return Violation(field, f"with engine mma a warp has both products of its keys, not {other}; use mma for both")
    if qk_engine != "scalar" or pv_engine != "wgmma":
        return None
    return Violation("qk.engine", "a scalar QK product before a WGMMA PV product is not rendered; use wgmma for both")


@rule(kind=GENERATOR, topic="loads")
def wgmma_load(wgmma: bool, load_engine: str) -> Violation | None:
    """The tiles that WGMMA reads are written by TMA, in the same (async) proxy.

    PTX ISA, "Async Proxy": writes by other loads would need a fence.proxy.async of their own.
    """
    if not wgmma or load_engine == "tma":
        return None
    return Violation(
        "load.engine", f"WGMMA reads tiles that TMA wrote; {load_engine} loads are not rendered with it; use tma"
    )


@rule(kind=GENERATOR, topic="P")
def handoff_engines(through: str, qk_engine: str, pv_engine: str, pv_a_source: str | None) -> Violation | None:
    """The way P takes fits the product that makes it and the one that reads it.

    `pv_a_source` is None for a scalar PV product.
    """
    have = f"{qk_engine} and {pv_engine}"
    match through:
        case "global_f32" if (qk_engine, pv_engine) != ("scalar", "scalar"):
            return Violation(
                "handoff.through", f"global_f32 needs scalar qk and pv, got {have}; use {_usual(qk_engine, pv_engine)}"
            )
        case "smem_f32" if pv_engine != "scalar":
            return Violation(
                "handoff.through", f"smem_f32 needs a scalar pv, got {have}; use {_usual(qk_engine, pv_engine)}"
            )
        case "registers" if (qk_engine, pv_engine) == ("mma", "mma"):
            return None
        case "smem_16bit" | "registers" if (qk_engine, pv_engine) != ("wgmma", "wgmma"):
            return Violation(
                "handoff.through",
                f"{through} needs wgmma for qk and pv, got {have}; use {_usual(qk_engine, pv_engine)}",
            )
        case "smem_16bit" if pv_a_source != "smem":
            return Violation("pv.a.source", "P goes through shared memory (handoff smem_16bit); use source: smem")
        case "registers" if pv_a_source != "registers":
            return Violation("pv.a.source", "P stays in registers (handoff registers); use source: registers")
    return None


@rule(kind=GENERATOR, topic="loads")
def global_handoff_load(through: str, load_engine: str) -> Violation | None:
    """The three kernels of a global handoff read global memory directly."""
    if through != "global_f32" or load_engine == "sync":
        return None
    return Violation(
        "load.engine",
        f"handoff global_f32 reads global memory directly, so that {load_engine} has nothing to fill; use sync",
    )


@rule(kind=GENERATOR, topic="layouts")
def smem_section(through: str, given: bool) -> Violation | None:
    """All kernels but those of a global handoff keep Q, K and V in shared memory."""
    if through == "global_f32" and given:
        return Violation(
            "smem", "handoff global_f32 keeps no tile in shared memory; take smem out (smem: null, over a base)"
        )
    if through != "global_f32" and not given:
        return Violation(
            "smem", "Q, K and V pass through shared memory; give their swizzles, {q: none, k: none, v: none}"
        )
    return None


@rule(kind=GENERATOR, topic="kv order")
def window_product(mask: str, pv_engine: str) -> Violation | None:
    """Sliding windows are rendered where the softmax works on the accumulator fragment."""
    if mask != "window" or pv_engine == "wgmma":
        return None
    return Violation(
        "mask", "a sliding window is rendered with both products on WGMMA only; use mask causal or none, or extend k4_2"
    )


@rule(kind=GENERATOR, topic="kv order")
def window_sides(mask: str, left: int | None, right: int | None) -> Violation | None:
    """Both sides of a window are compiled in, or both are arguments of a call."""
    if mask != "window" or (left is None) == (right is None):
        return None
    missing, there = ("left", f"right: {right}") if left is None else ("right", f"left: {left}")
    return Violation(
        f"mask.{missing}",
        f"a window has both sides compiled in, or gets both with each call, and here is {there} alone; give {missing} "
        f"as well ({WINDOW_MAX} for all keys), or leave both out",
    )


@rule(kind=GENERATOR, topic="output")
def optional_lse(lse: bool, pv_engine: str) -> Violation | None:
    """A kernel without LSE is rendered where the softmax works on the accumulator fragment."""
    if lse or pv_engine == "wgmma":
        return None
    return Violation(
        "outputs.lse",
        "a kernel without LSE is rendered with both products on WGMMA only; use lse: true (attention() returns O alone "
        "unless asked), or extend k4_2",
    )


def _usual(qk_engine: str, pv_engine: str) -> str:
    """The handoff to use between two engines."""
    return "registers" if (qk_engine, pv_engine) == ("wgmma", "wgmma") else "smem_f32"
