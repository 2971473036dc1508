"""How long things take, in clock cycles of an SM: derived from a spec and a chip, each to be overridden.

What a group of four warps (a warpgroup) needs of a unit follows from `fa3gen.design.work` and the chip's peak
rates. The only figure that follows from nothing here is the latency of a load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fa3gen.base.errors import UserError
from fa3gen.design import footprint, work
from fa3gen.design.footprint import thread_rows
from fa3gen.hardware import hopper
from fa3gen.hardware.chips import Chip
from fa3gen.spec.model import CpAsyncLoad, GlobalHandoff, SmemHandoff, SmemScoresHandoff, Spec, SyncLoad, WgmmaProduct

# From the end of a tile's transfer out of L2 to its mbarrier's phase. tests/gpu/load_probe.py found on an H200, from
# the request of a tile to its landing with nothing else in flight: 584 cycles for 1 KB in L2, 649 for 8 KB, 723 for
# 16 KB, 16 more when all SMs do it, and 1059 to 1369 from HBM. This is the first less the transfer of 1 KB at an SM's
# share of L2.
LOAD_LATENCY = 560.0
# Instructions of a thread for each 16 bytes that it copies itself: addresses in global and shared memory, bounds.
COPY_INSTRUCTIONS = 6
# Instructions of a warp around a stmatrix of P: addresses, fence.proxy.async and the barrier of the warpgroup.
STORE_P_INSTRUCTIONS = 40
# Of a warp for each of its elements of O after the last tile: normalise, round, store.
EPILOGUE_INSTRUCTIONS = 3


@dataclass(frozen=True)
class Piece:
    """Something that a group of four warps computes: issue slots and exponential cycles that it needs of an SM.

    Alone on the SM it takes the larger of the two, plus `fixed` cycles that nobody else has to share.
    """

    name: str
    issue: float
    exp: float = 0.0
    fixed: float = 0.0

    @property
    def alone(self) -> float:
        """Cycles when nobody else computes."""
        return max(self.issue, self.exp) + self.fixed

    def scaled(self, factor: float) -> "Piece":
        """The same, slower."""
        return replace(self, issue=self.issue * factor, exp=self.exp * factor, fixed=self.fixed * factor)


@dataclass(frozen=True)
class Times:
    """Cycles of one step of one group of four warps, and of loads.

    `qk_tensor` and `pv_tensor` are cycles of the tensor cores, 0 for a product on scalars, which is `qk` or `pv` then.
    `softmax` comes between the products; `rescale` waits for the last P V where products run beside the softmax.
    Loads of `q_bytes`, `k_bytes` and `v_bytes` share `load_rate` bytes a cycle and land `load_latency` later;
    `copy_k` and `copy_v` are what the warps themselves do for them.
    """

    qk_tensor: float
    pv_tensor: float
    qk: Piece | None
    pv: Piece | None
    softmax: tuple[Piece, ...]
    rescale: Piece
    epilogue: Piece
    load_latency: float
    load_rate: float
    q_bytes: int
    k_bytes: int
    v_bytes: int
    copy_q: Piece | None
    copy_k: Piece | None
    copy_v: Piece | None

    @property
    def softmax_alone(self) -> float:
        """Cycles of a softmax of one group when nobody else computes."""
        return sum(piece.alone for piece in (*self.softmax, self.rescale))

    @property
    def products_alone(self) -> tuple[float, float]:
        """Cycles of the two products of one group when nobody else computes."""
        qk = self.qk_tensor if self.qk is None else self.qk.alone
        return qk, self.pv_tensor if self.pv is None else self.pv.alone

    def overridden(
        self,
        *,
        load_latency: float | None = None,
        load_rate: float | None = None,
        product_time: float | None = None,
        softmax_time: float | None = None,
    ) -> "Times":
        """Other times: of each product of one group, and of its softmax when nobody else computes.

        The parts of a softmax keep their proportions.
        """
        changed = replace(
            self,
            load_latency=self.load_latency if load_latency is None else load_latency,
            load_rate=self.load_rate if load_rate is None else load_rate,
        )
        if product_time is not None:
            changed = replace(
                changed,
                qk_tensor=product_time if changed.qk is None else 0.0,
                pv_tensor=product_time if changed.pv is None else 0.0,
                qk=_lasting([changed.qk], product_time)[0] if changed.qk else None,
                pv=_lasting([changed.pv], product_time)[0] if changed.pv else None,
            )
        if softmax_time is not None:
            *softmax, rescale = _lasting([*changed.softmax, changed.rescale], softmax_time)
            changed = replace(changed, softmax=tuple(softmax), rescale=rescale)
        return changed


def _lasting(pieces: Sequence[Piece], cycles: float) -> list[Piece]:
    now = sum(piece.alone for piece in pieces)
    return [piece.scaled(cycles / now) for piece in pieces]


def times_of(spec: Spec, chip: Chip) -> Times:
    """Derive the times of a spec on a chip. Raises UserError for k1, which has no pipeline."""
    if isinstance(spec.handoff, GlobalHandoff):
        raise UserError("k1 has no loop over tiles of keys and so no pipeline to simulate; try k2 and later rungs")
    softmax, rescale = _softmax(spec, chip)
    qk_tensor, pv_tensor = _tensor(spec, chip)
    kv, d, v_dim = spec.tile.kv, spec.problem.head_dim, spec.problem.v_dim
    rows, lanes = thread_rows(spec)
    return Times(
        qk_tensor=qk_tensor,
        pv_tensor=pv_tensor,
        qk=(
            None
            if isinstance(spec.qk, WgmmaProduct)
            else _issue(spec, "S = Q K^T", work.scalar_qk_instructions(spec), chip)
        ),
        pv=(
            None
            if isinstance(spec.pv, WgmmaProduct)
            else _issue(spec, "O += P V", work.scalar_pv_instructions(spec), chip)
        ),
        softmax=softmax,
        rescale=rescale,
        epilogue=_issue(spec, "epilogue", EPILOGUE_INSTRUCTIONS * rows * v_dim / lanes, chip),
        load_latency=LOAD_LATENCY,
        load_rate=chip.l2.value / chip.sms,
        q_bytes=spec.tile.q * d * spec.element.bytes,
        k_bytes=kv * d * spec.element.bytes,
        v_bytes=kv * v_dim * spec.element.bytes,
        copy_q=_copy(spec, spec.tile.q, d, chip),
        copy_k=_copy(spec, kv, d, chip),
        copy_v=_copy(spec, kv, v_dim, chip),
    )


def groups(spec: Spec) -> int:
    """Groups of four warps that compute; scalar kernels may have fewer warps, or some to spare, in a group."""
    return max(1, footprint.computing_threads(spec) // hopper.WARPGROUP)


def _threads(spec: Spec) -> float:
    """Threads of a group."""
    return footprint.computing_threads(spec) / groups(spec)


def _issue(spec: Spec, name: str, instructions: float, chip: Chip) -> Piece:
    """So many instructions of each warp of a group."""
    return Piece(name, _threads(spec) / hopper.WARP * instructions / chip.issue.value)


def _tensor(spec: Spec, chip: Chip) -> tuple[float, float]:
    """Cycles of the products of one group: of the tensor cores, or of reading operands where that takes longer."""
    count, rows = groups(spec), spec.tile.q
    bytes_read = work.wgmma_smem_bytes(spec)
    pairs = ((spec.qk, spec.problem.head_dim), (spec.pv, spec.problem.v_dim))
    cycles = []
    for (product, depth), read in zip(pairs, bytes_read, strict=True):
        flops = 2 * rows * spec.tile.kv * depth if isinstance(product, WgmmaProduct) else 0
        cycles.append(max(flops / chip.tensor.value, read / chip.smem.value) / count)
    return cycles[0], cycles[1]


def _softmax(spec: Spec, chip: Chip) -> tuple[tuple[Piece, ...], Piece]:
    """The softmax of one group, and what of it has to wait for O."""
    rows, lanes = thread_rows(spec)
    exponentials = _threads(spec) * rows * (spec.tile.kv // lanes + 1) / chip.exp2.value
    if not isinstance(spec.pv, WgmmaProduct):
        instructions = work.scalar_softmax_instructions(spec)
        pieces = [replace(_issue(spec, "softmax", instructions, chip), exp=exponentials)]
        if isinstance(spec.handoff, SmemScoresHandoff) and isinstance(spec.qk, WgmmaProduct):
            scores = spec.tile.q * spec.tile.kv / groups(spec) / _threads(spec)
            pieces.insert(0, _issue(spec, "store S", scores + work.WGMMA_STEP_INSTRUCTIONS, chip))
        return tuple(pieces), Piece("rescale", 0.0)
    maxima, between, rescale = work.score_phases(spec)
    parts = [
        _issue(spec, "maxima", maxima + work.WGMMA_STEP_INSTRUCTIONS, chip),
        replace(_issue(spec, "exponentials", between, chip), exp=exponentials),
    ]
    last = _issue(spec, "rescale, round", rescale, chip)
    if isinstance(spec.handoff, SmemHandoff):
        written = spec.tile.q * spec.tile.kv * spec.element.bytes / groups(spec) / chip.smem.value
        last = replace(_issue(spec, last.name, rescale + STORE_P_INSTRUCTIONS, chip), fixed=written)
    return tuple(parts), last


def _copy(spec: Spec, rows: int, columns: int, chip: Chip) -> Piece | None:
    """What one group does for a tile that the warps copy themselves; None with TMA."""
    if not isinstance(spec.load, SyncLoad | CpAsyncLoad):
        return None
    vectors = rows * columns / footprint.SCALAR_VECTOR / footprint.computing_threads(spec)
    return _issue(spec, "copy", COPY_INSTRUCTIONS * vectors, chip)
