"""How long things take, in clock cycles of an SM: derived from a spec and a chip, each to be overridden.

What a group of four warps (a warpgroup) needs of a unit follows from `fa3gen.design.work` and the chip's peak
rates. What follows from nothing here are the latency of a load, which was measured, and how long the instructions of a
lone warp wait for one another, which stands in the compiled code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fa3gen.base.errors import UserError
from fa3gen.compile.one_bank import NO_CONFLICTS, OneBank
from fa3gen.design import footprint, work
from fa3gen.design.footprint import thread_rows
from fa3gen.design.work import SmemBytes
from fa3gen.hardware import hopper
from fa3gen.hardware.chips import Chip
from fa3gen.hardware.dtypes import VECTOR_BYTES
from fa3gen.spec.model import (
    CpAsyncLoad,
    Forward,
    GlobalHandoff,
    SmemHandoff,
    SmemScoresHandoff,
    SyncLoad,
    WgmmaProduct,
)

# Units of an SM that take their time. A product needs the tensor cores, and shared memory for its operands; a load
# needs the SM's share of L2 ("loads"), and shared memory to be written to.
Unit = Literal["tensor cores", "exponentials", "issue", "shared memory", "loads"]
Needs = Mapping[Unit, float]
UNITS: tuple[Unit, ...] = ("tensor cores", "exponentials", "issue", "shared memory", "loads")

# From the beginning of a tile's transfer out of L2 to its mbarrier's phase. tests/gpu/load_probe.py found on an H200,
# from the request of a tile to its landing with nothing else in flight: 584 cycles for 1 KB in L2, 649 for 8 KB, 723
# for 16 KB, 16 more when all SMs do it, and 1059 to 1369 from HBM. The three sizes lie on a line: this latency, and so
# many bytes a cycle. All SMs together get fewer bytes, their shares of L2.
LOAD_LATENCY = 575.0
LANDING_RATE = 110.5
# What it takes longer out of HBM: those 1059 cycles for 1 KB, and 584 in L2.
HBM_LATENCY_MORE = 1059.0 - 584.0
# From one multiply-add of a thread to another that needs its result: ptxas leaves so many cycles between them in every
# module, and arXiv 2208.11174 measured them for an FP32 addition on an A100.
FMA_LATENCY = 4.0
# Of a multiply-add whose operands all lie in one bank of registers: a bank gives two operands a cycle. Three CTAs of
# k3_2_d64 on an SM of an H200 lost 0.98 cycles for each to which a patch of the cubin had given such registers.
ONE_BANK = 1.0
# Share of the multiply-adds of Q K^T behind which a warp goes on in the next cycle: behind the others it waits for the
# result, as long with a conflict as without. In the stall counts of the compiled modules it is 0.41 to 0.5.
UNHIDDEN = 0.44
# For each few keys of a scalar P V a warp computes addresses, loads V and P, and waits: nothing else is left to do. In
# the stall counts of the compiled modules that is 46 to 114 cycles, a load from shared memory taken for 30.
OPERAND_WAIT = 65.0
# Cycles from one instruction of a lone warp to its next in a softmax, of all kinds of kernels: chains of maxima and
# sums, shuffles, exponentials. In the stall counts of the compiled modules it is 2.2 to 2.7.
SOFTMAX_PACE = 2.4
# Instructions of a thread for each 16 bytes that it copies itself: addresses in global and shared memory, bounds.
COPY_INSTRUCTIONS = 6
# Instructions of a warp for each 32 keys and 16 columns of V that it transposes: ldmatrix, four byte permutes,
# stmatrix, addresses. As compiled, 85 for 8 of them and the barriers of two rings.
TRANSPOSE_INSTRUCTIONS = 10
# Of a warp for each 8 elements of a thread that it converts from 8 bits to bfloat16: as compiled, 4 conversions to
# pairs of float16, 8 to float32, 4 to pairs of bfloat16, a read, a write and two for addresses.
CONVERT_INSTRUCTIONS = 20
# Instructions of a warp around a stmatrix of P: addresses, fence.proxy.async and the barrier of the warpgroup.
STORE_P_INSTRUCTIONS = 40
# Of a warp for each of its elements of O after the last tile: normalise, round, store.
EPILOGUE_INSTRUCTIONS = 3


@dataclass(frozen=True)
class Piece:
    """Something that a group of four warps does: cycles that it needs of units of an SM.

    They are issue slots, exponentials, shared memory at its full width, and tensor cores. `chain` is how long a warp
    takes with all of the SM to itself, since instructions wait for the results of others. Alone on the SM the piece
    takes the largest of them. One that needs the tensor cores is a product on WGMMA, others are computed by the warps.
    """

    name: str
    issue: float = 0.0
    exp: float = 0.0
    smem: float = 0.0
    tensor: float = 0.0
    chain: float = 0.0

    @property
    def needs(self) -> Needs:
        """Cycles of each unit."""
        return {
            "tensor cores": self.tensor,
            "exponentials": self.exp,
            "issue": self.issue,
            "shared memory": self.smem,
        }

    @property
    def alone(self) -> float:
        """Cycles when nobody else needs anything."""
        return max(self.chain, *self.needs.values())

    def scaled(self, factor: float) -> "Piece":
        """The same, slower."""
        units = (self.issue, self.exp, self.smem, self.tensor, self.chain)
        issue, exp, smem, tensor, chain = (factor * cycles for cycles in units)
        return replace(self, issue=issue, exp=exp, smem=smem, tensor=tensor, chain=chain)


@dataclass(frozen=True)
class Times:
    """Cycles of one step of one group of four warps, and of loads.

    `qk` and `pv` are the products. `softmax` comes between them; `rescale` waits for the last P V where products run
    beside the softmax. Loads of `q_bytes`, `k_bytes` and `v_bytes` share `load_rate` bytes a cycle, are written to
    shared memory at `smem_rate` bytes a cycle when nobody else needs it, and have landed `flight` cycles after they
    began, if they are through by then; `copy_k` and `copy_v` are what a group itself does for them, or a producer warp.
    `transpose` is what warps of their own do with a tile of V, where there are such; `convert_k` and `convert_v` are
    what warps of their own do with tiles of K and V in 8 bits. `read_q`, `read_k` and `read_v` are reads to registers
    that come before a product, where warps multiply keys of their own.
    """

    qk: Piece
    pv: Piece
    softmax: tuple[Piece, ...]
    rescale: Piece
    epilogue: Piece
    load_latency: float
    landing_rate: float
    load_rate: float
    smem_rate: float
    q_bytes: int
    k_bytes: int
    v_bytes: int
    copy_q: Piece | None
    copy_k: Piece | None
    copy_v: Piece | None
    transpose: Piece | None = None
    convert_k: Piece | None = None
    convert_v: Piece | None = None
    read_q: Piece | None = None
    read_k: Piece | None = None
    read_v: Piece | None = None

    @property
    def softmax_alone(self) -> float:
        """Cycles of a softmax of one group when nobody else computes."""
        return sum(piece.alone for piece in (*self.softmax, self.rescale))

    @property
    def products_alone(self) -> tuple[float, float]:
        """Cycles of the two products of one group when nobody else computes."""
        return self.qk.alone, self.pv.alone

    def from_hbm(self, share: float, rate: float) -> "Times":
        """Times of an SM to which HBM brings `rate` bytes a cycle, where it has so much of what is loaded, not L2."""
        slower = min(self.load_rate, rate / share) if share else self.load_rate
        return replace(self, load_latency=self.load_latency + share * HBM_LATENCY_MORE, load_rate=slower)

    def transfer(self, size: int) -> Needs:
        """Cycles of each unit that so many bytes from L2 to shared memory need."""
        return {"loads": size / self.load_rate, "shared memory": size / self.smem_rate}

    def flight(self, size: int) -> float:
        """Cycles from the beginning of a tile's transfer to its landing when no other load is under way."""
        return self.load_latency + size / self.landing_rate

    def read(self, what: str) -> Piece | None:
        """What it takes to read Q, K or V to registers that the module calls `what`; None where that is no step."""
        return {"rQ": self.read_q, "rK": self.read_k, "rV": self.read_v}.get(what)

    @property
    def in_a_step(self) -> tuple[Piece, ...]:
        """All that a group computes for one tile of keys."""
        reads = (piece for piece in (self.read_k, self.read_v) if piece is not None)
        return (self.qk, self.pv, *self.softmax, self.rescale, *reads)

    @property
    def copies(self) -> tuple[Piece, ...]:
        """What it takes to copy one tile of K and V, where warps do."""
        return tuple(piece for piece in (self.copy_k, self.copy_v) if piece is not None)

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
            [qk], [pv] = _lasting([changed.qk], product_time), _lasting([changed.pv], product_time)
            changed = replace(changed, qk=qk, pv=pv)
        if softmax_time is not None:
            *softmax, rescale = _lasting([*changed.softmax, changed.rescale], softmax_time)
            changed = replace(changed, softmax=tuple(softmax), rescale=rescale)
        return changed


def _lasting(pieces: Sequence[Piece], cycles: float) -> list[Piece]:
    now = sum(piece.alone for piece in pieces)
    return [piece.scaled(cycles / now) for piece in pieces]


def times_of(spec: Forward, chip: Chip, one_bank: OneBank = NO_CONFLICTS) -> Times:
    """Derive the times of a spec on a chip. Raises UserError for k1, which has no pipeline.

    Of products on scalars `one_bank` says what is known of the compiled code; by default there are no conflicts.
    """
    if isinstance(spec.handoff, GlobalHandoff):
        raise UserError("k1 has no loop over tiles of keys and so no pipeline to simulate; try k2 and later rungs")
    through_smem = work.smem_bytes(spec)
    softmax, rescale = _softmax(spec, chip, through_smem)
    kv, d, v_dim = spec.tile.kv, spec.problem.head_dim, spec.problem.v_dim
    rows, lanes = thread_rows(spec)
    return Times(
        qk=_qk(spec, chip, through_smem, one_bank.qk),
        pv=_pv(spec, chip, through_smem, one_bank.pv),
        softmax=softmax,
        rescale=rescale,
        epilogue=_issue(spec, "epilogue", EPILOGUE_INSTRUCTIONS * rows * v_dim / lanes, chip),
        load_latency=LOAD_LATENCY,
        landing_rate=LANDING_RATE,
        load_rate=chip.l2.value / chip.sms,
        smem_rate=chip.smem.value,
        q_bytes=spec.tile.q * d * spec.element.bytes,
        k_bytes=kv * d * spec.kv_element.bytes,
        v_bytes=kv * v_dim * spec.kv_element.bytes,
        copy_q=None if footprint.gathered(spec) else _copy(spec, spec.tile.q, d, chip),
        copy_k=_copy(spec, kv, d, chip),
        copy_v=_copy(spec, kv, v_dim, chip),
        transpose=_transpose(spec, chip, through_smem) if footprint.transposes(spec) else None,
        convert_k=_convert(spec, "K", d, chip) if footprint.converts(spec) else None,
        convert_v=_convert(spec, "V", v_dim, chip) if footprint.converts(spec) else None,
        **(_reads(spec, chip, through_smem) if footprint.by_warps(spec) else {}),
    )


def _reads(spec: Forward, chip: Chip, through_smem: SmemBytes) -> dict[str, Piece]:
    """Reads of one group from shared memory. All of its warps read Q once in a tile, which counts as instructions."""
    d, v_dim = spec.problem.head_dim, spec.problem.v_dim
    of_q = spec.tile.q * d * spec.element.bytes / VECTOR_BYTES / hopper.WARP
    return {
        "read_q": _issue(spec, "read Q", of_q, chip),
        "read_k": _issue(spec, "read K", work.read_instructions(spec, d), chip, through_smem.qk),
        "read_v": _issue(spec, "read V", work.read_instructions(spec, v_dim), chip, through_smem.pv),
    }


def _convert(spec: Forward, what: str, head_dim: int, chip: Chip) -> Piece:
    """What the warps that convert K, or V, do with a tile."""
    elements, warps = spec.tile.kv * head_dim, footprint.converting_warps(spec)
    instructions = CONVERT_INSTRUCTIONS * elements / (8 * hopper.WARP)  # of all warps
    smem = elements * (spec.kv_element.bytes + spec.element.bytes) / chip.smem.value
    issue = instructions / chip.issue.value
    return Piece(f"convert {what}", issue=issue, smem=smem, chain=SOFTMAX_PACE * instructions / warps)


def _transpose(spec: Forward, chip: Chip, through_smem: SmemBytes) -> Piece:
    """What the warps that transpose V do with a tile."""
    instructions = TRANSPOSE_INSTRUCTIONS * footprint.transposed_blocks(spec)
    issue = spec.tile.transposers * instructions / chip.issue.value
    smem = through_smem.transposed / chip.smem.value
    return Piece("transpose V", issue=issue, smem=smem, chain=SOFTMAX_PACE * instructions)


def groups(spec: Forward) -> int:
    """Groups of four warps that compute; scalar kernels may have fewer warps, or some to spare, in a group."""
    return max(1, footprint.computing_threads(spec) // hopper.WARPGROUP)


def _threads(spec: Forward) -> float:
    """Threads of a group."""
    return footprint.computing_threads(spec) / groups(spec)


def _issue(
    spec: Forward, name: str, instructions: float, chip: Chip, smem_bytes: float = 0.0, *, pace: float = 1.0
) -> Piece:
    """So many instructions of each warp of a group, and bytes through shared memory that all groups share.

    A warp that has its scheduler to itself issues one in `pace` cycles.
    """
    cycles = _threads(spec) / hopper.WARP * instructions / chip.issue.value
    smem = smem_bytes / groups(spec) / chip.smem.value
    return Piece(name, issue=cycles, smem=smem, chain=pace * instructions)


def _qk(spec: Forward, chip: Chip, through_smem: SmemBytes, conflicts: int) -> Piece:
    """S = Q K^T of one group. One on scalars stores S as well."""
    if isinstance(spec.qk, WgmmaProduct):
        return _wgmma(spec, "S = Q K^T", spec.problem.head_dim, chip, through_smem.qk)
    if footprint.by_warps(spec):
        return _issue(spec, "S = Q K^T", work.mma_instructions(spec, spec.problem.head_dim), chip)
    read_and_written = through_smem.qk + through_smem.scores
    slots = work.scalar_qk_instructions(spec) + ONE_BANK * conflicts
    piece = _issue(spec, "S = Q K^T", slots, chip, read_and_written)
    # The multiply-adds of a score follow one another, eight at a time, and each waits for the one before. That hides
    # most conflicts from a lone warp.
    multiply_adds = spec.tile.q * spec.tile.kv * spec.problem.head_dim / footprint.computing_threads(spec)
    return replace(piece, chain=FMA_LATENCY * multiply_adds + UNHIDDEN * ONE_BANK * conflicts)


def _pv(spec: Forward, chip: Chip, through_smem: SmemBytes, conflicts: int) -> Piece:
    """O += P V of one group."""
    if isinstance(spec.pv, WgmmaProduct):
        return _wgmma(spec, "O += P V", spec.problem.v_dim, chip, through_smem.pv)
    if footprint.by_warps(spec):
        return _issue(spec, "O += P V", work.mma_instructions(spec, spec.problem.v_dim), chip)
    slots = work.scalar_pv_instructions(spec) + ONE_BANK * conflicts
    piece = _issue(spec, "O += P V", slots, chip, through_smem.pv)
    return replace(piece, chain=slots + OPERAND_WAIT * footprint.SCALAR_LANES)


def _wgmma(spec: Forward, name: str, depth: int, chip: Chip, smem_bytes: int) -> Piece:
    """A product of one group on the tensor cores, which read operands from shared memory meanwhile."""
    count, flops = groups(spec), 2 * spec.tile.q * spec.tile.kv * depth
    rate = chip.tensor_rate(spec.element.bytes)
    return Piece(name, tensor=flops / rate / count, smem=smem_bytes / chip.smem.value / count)


def _softmax(spec: Forward, chip: Chip, through_smem: SmemBytes) -> tuple[tuple[Piece, ...], Piece]:
    """The softmax of one group, and what of it has to wait for O."""
    rows, lanes = thread_rows(spec)
    exponentials = _threads(spec) * (rows * spec.tile.kv // lanes + work.rescaled_rows(spec)) / chip.exp2.value
    tanhs = work.tanhs(spec) / groups(spec) / chip.exp2.value
    if not (isinstance(spec.pv, WgmmaProduct) or footprint.by_warps(spec)):
        instructions = work.scalar_softmax_instructions(spec)
        softmax = _issue(spec, "softmax", instructions, chip, through_smem.softmax, pace=SOFTMAX_PACE)
        pieces = [replace(softmax, exp=exponentials)]
        if isinstance(spec.handoff, SmemScoresHandoff) and isinstance(spec.qk, WgmmaProduct):
            scores = spec.tile.q * spec.tile.kv / groups(spec) / _threads(spec)
            stored = scores + work.issue_instructions(spec)
            pieces.insert(0, _issue(spec, "store S", stored, chip, through_smem.scores))
        return tuple(pieces), Piece("rescale")
    maxima, between, rescale = work.score_phases(spec)
    if isinstance(spec.handoff, SmemHandoff):
        rescale += STORE_P_INSTRUCTIONS
    parts = (
        replace(_issue(spec, "maxima", maxima + work.issue_instructions(spec), chip, pace=SOFTMAX_PACE), exp=tanhs),
        replace(_issue(spec, "exponentials", between, chip, pace=SOFTMAX_PACE), exp=exponentials),
    )
    return parts, _issue(spec, "rescale, round", rescale, chip, through_smem.softmax, pace=SOFTMAX_PACE)


def _copy(spec: Forward, rows: int, columns: int, chip: Chip) -> Piece | None:
    """What one group does for a tile that the warps copy themselves; None with TMA.

    Keys that come out of pages row by row are copied by a warp that does nothing else.
    """
    if footprint.gathered(spec):
        copied = rows * columns * spec.kv_element.bytes
        instructions = COPY_INSTRUCTIONS * copied / VECTOR_BYTES / hopper.WARP
        return Piece("copy", issue=instructions / chip.issue.value, chain=instructions)
    if not isinstance(spec.load, SyncLoad | CpAsyncLoad):
        return None
    vectors = rows * columns / footprint.SCALAR_VECTOR / footprint.computing_threads(spec)
    return _issue(spec, "copy", COPY_INSTRUCTIONS * vectors, chip)
