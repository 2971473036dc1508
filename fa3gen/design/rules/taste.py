"""Rules of taste: what is rendered and right, but slower than something else or larger for nothing.

Asked about legal specs only. A taste that a measurement contradicts has to go: `fa3gen tune` tries such specs, too.
"""

from __future__ import annotations

from fa3gen.design import footprint
from fa3gen.design.rules.registry import TASTE, Violation, rule
from fa3gen.hardware import hopper

# Columns of O up to which a vote and a branch cost more than rescaling every time.
RESCALED_AT_ONCE = 128


@rule(kind=TASTE, topic="q order")
def drawn_without_mask(scheduler: str, mask: str) -> Violation | None:
    """Drawing tiles evens out their lengths, and without a mask these are equal."""
    if scheduler != "dynamic" or mask != "none":
        return None
    return Violation(
        "scheduler",
        "without a mask all tiles are equally long, and a counter has nothing to even out; use static or stream_k",
    )


@rule(kind=TASTE, topic="q order")
def dealt_under_causal(scheduler: str, mask: str) -> Violation | None:
    """Tiles of a causal mask differ in length, and drawing them, longest first, evens that out.

    Measured: docs/performance.md, "a counter and longest first".
    """
    if scheduler != "static" or mask != "causal":
        return None
    return Violation(
        "scheduler",
        "under a causal mask tiles differ in length, so that CTAs with tiles known from the start would end at "
        "different times; use dynamic",
    )


@rule(kind=TASTE, topic="softmax")
def rescale_few_columns(rescale_above: int | None, v_dim: int) -> Violation | None:
    """Rescaling now and then pays where O is wide: it saves multiplications, and costs a vote and a branch.

    Measured: docs/performance.md, "rescaling rarely" (head dims 64, 128 and 192/128 became slower, 256 faster).
    """
    if rescale_above is None or v_dim > RESCALED_AT_ONCE:
        return None
    return Violation(
        "softmax.rescale_above",
        f"up to {RESCALED_AT_ONCE} columns of O are rescaled in less time than a vote and a branch take, "
        f"and O has {v_dim}; use null",
    )


@rule(kind=TASTE, topic="shared memory")
def buffer_for_one_output(scheduler: str, o: str, tile_q: int, head_dim: int, v_dim: int) -> Violation | None:
    """A CTA with one tile has no next Q, so that O can lie where Q was."""
    if scheduler not in footprint.CTA_PER_TILE or o != "own_buffer" or v_dim > head_dim:
        return None
    size = hopper.BYTES_16BIT
    return Violation(
        "outputs.o",
        f"with scheduler {scheduler} no next Q is loaded, and a buffer for O takes {tile_q} x {v_dim} x {size} = "
        f"{tile_q * v_dim * size} bytes of shared memory for nothing; use over_q",
    )


@rule(kind=TASTE, topic="loads")
def idle_q_stages(stages: int, persistent: bool) -> Violation | None:
    """A CTA has one tile in hand, and the next one where it takes many: more buffers of Q stay empty."""
    if stages == 1 or (persistent and stages == 2):
        return None
    if persistent:
        return Violation("load.q_stages", f"a CTA needs Q of this tile and of the next, not of {stages}; use 1 or 2")
    return Violation(
        "load.q_stages",
        f"with scheduler single_tile a CTA loads one Q tile, so that {stages} Q buffers are of no use; use 1",
    )
