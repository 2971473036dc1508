"""Warpgroup products: descriptors, register fragments, and the queue of operations in flight.

PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions": "Matrix Descriptor Format",
"Shared Memory Matrix Layout", "Register Fragments". An operation reads its shared-memory operands as late as it may:
when the wgmma.wait_group that covers it is about to return.

Products are summed in float64 and rounded to float32 once, or, slower, summed as the tensor core adds them
(`Settings.sums`). Sums of so few products of 16 or 8 bits are exact in float64, but for the rarest: so a row's bits
are its own. In float32 they would follow from the order in which BLAS adds, which is another for rows at the end of a
block, and from processor to processor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3gen.cpu.findings import Hazard, Kind, OutsideModel
from fa3gen.cpu.lanes import FP8_VALUES, spread
from fa3gen.cpu.tensor_core import add_products
from fa3gen.cpu.truth import some
from fa3gen.hardware.hopper import WGMMA_M as M

SWIZZLE_SPAN = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes, by the descriptor's swizzle code
SWIZZLE_BITS = {0: 0, 1: 3, 2: 2, 3: 1}

Matrix = NDArray[np.float32]


class InFlight:
    """Stands in an accumulator register while the products on it are in flight; of no use to any other instruction."""

    __slots__ = ("operations", "value")
    __array_ufunc__ = None
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        """A comparison is a use as well."""
        raise TypeError("an accumulator in flight has no value")

    def __init__(self, shape: tuple[int, int]) -> None:
        """The sum so far, `value`, starts at zero; (64, N)."""
        self.operations = 0  # number of the last operation on these registers, plus one
        self.value: Matrix = np.zeros(shape, np.float32)


@dataclass(frozen=True)
class Shape:
    """What one wgmma.mma_async instruction says by itself."""

    instruction: int
    n: int
    accumulator: str  # "f32" or "f16"
    a_type: str
    b_type: str
    accumulator_registers: tuple[int, ...]
    fragment_registers: tuple[int, ...]  # empty where A comes from shared memory
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool
    register_mask: int = field(default=0, compare=False)

    @functools.cached_property
    def accumulators(self) -> frozenset[int]:
        """Numbers of the accumulator registers."""
        return frozenset(self.accumulator_registers)


@dataclass
class Operation:
    """One product of the whole warpgroup; its four warps issue it one after the other."""

    shape: Shape
    a_descriptor: int | None
    b_descriptor: int
    accumulate: bool
    token: InFlight
    a_chunks: NDArray[np.intp] | None = None
    b_chunks: NDArray[np.intp] | None = None
    a_rows: Matrix | None = None  # (64, K) of a register operand
    written: NDArray[np.int32] | None = None  # when each agent has last written to the operands, see `_note_reads`
    guards: int = 0  # how often memory had been guarded by then


@dataclass
class Queue:
    """Products of one warpgroup in the order of issue. `done` of them are complete, `wanted` are waited for."""

    operations: list[Operation] = field(default_factory=list)
    done: int = 0
    wanted: int = 0
    issued: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    commits: list[list[int]] = field(default_factory=lambda: [[], [], [], []])


class WgmmaUnit:
    """The products of a CTA."""

    def __init__(self, cta: Any) -> None:
        """One queue for each warpgroup."""
        self.cta = cta
        self.queues = [Queue() for _ in range(-(-cta.clocks.warps // 4))]

    # ------------------------------------------------------------------ instructions

    def fence(self, group: Any, mask: Any) -> None:
        """`wgmma.fence`: orders the warp's earlier register accesses before its products."""
        group.whole_warps(mask, "wgmma.fence")
        group.unfenced = 0
        group.fenced = True

    def issue(
        self, group: Any, shape: Shape, a: Any, b: Any, accumulate: Any, accumulators: tuple[Any, ...], mask: Any
    ) -> InFlight:
        """`wgmma.mma_async`: returns what the accumulator registers hold from now on.

        `a` is a descriptor or a tuple of fragment registers, `b` a descriptor, `accumulate` scale-d.
        """
        group.whole_warps(mask, "wgmma.mma_async")
        if not group.fenced or group.unfenced & shape.register_mask:
            raise Hazard(
                Kind.MISSING_WGMMA_FENCE,
                (
                    "registers of this wgmma were accessed since the last wgmma.fence of this warp"
                    if group.fenced
                    else "the first wgmma.mma_async of a warp needs a wgmma.fence before it"
                ),
            )
        queue, first = self._queue(group)
        number = queue.issued[first]
        accumulates = bool(group.one(accumulate, mask, "scale-d", Kind.WARPGROUP_DIVERGENCE))
        a_descriptor = (
            None if shape.fragment_registers else group.one(a, mask, "A descriptor", Kind.WARPGROUP_DIVERGENCE)
        )
        b_descriptor = group.one(b, mask, "B descriptor", Kind.WARPGROUP_DIVERGENCE)
        held = accumulators[0]
        chained = accumulates and held.__class__ is InFlight
        if number == len(queue.operations):
            token = held if chained else InFlight((M, shape.n))
            operation = Operation(shape, a_descriptor, b_descriptor, accumulates, token)
            self._find_operands(operation)
            queue.operations.append(operation)
        operation = queue.operations[number]
        self._check_same(operation, shape, a_descriptor, b_descriptor, accumulates)
        self._note_reads(group, operation, number)
        if accumulates:
            self._accumulators(group, operation, accumulators, chained)
        if shape.fragment_registers:
            self._fragments(group, operation, a)
            group.fragments_in_flight.append((number, shape.fragment_registers))
        for warp in group.warps.tolist():
            queue.issued[warp % 4] += 1
        token = operation.token
        token.operations = max(token.operations, number + 1)
        if all(token is not other for other, _ in group.in_flight):
            group.in_flight.append((token, shape))
        self.cta.note("wgmma issued", group, number=number, operation=operation)
        return token

    def commit(self, group: Any, mask: Any) -> None:
        """`wgmma.commit_group`."""
        group.whole_warps(mask, "wgmma.commit_group")
        queue, _ = self._queue(group)
        for warp in group.warps.tolist():
            queue.commits[warp % 4].append(queue.issued[warp % 4])
        self.cta.note("wgmma committed", group, queue=queue)

    def wait(self, group: Any, pending: int, mask: Any) -> bool:
        """`wgmma.wait_group`: True when at most `pending` of the warp's latest groups are in flight."""
        group.whole_warps(mask, "wgmma.wait_group")
        queue, first = self._queue(group)
        commits = queue.commits[first]
        if len(commits) <= pending:
            return True
        target = commits[len(commits) - 1 - pending]
        if queue.done < target:
            group.waits_for = (
                f"wgmma.wait_group {pending}: the warps of the warpgroup have issued {queue.issued} products, "
                f"{target} are waited for"
            )
            if min(queue.issued) >= target:
                queue.wanted = max(queue.wanted, target)
            if self.cta.schedule.completion != "early" or min(queue.issued) < target:
                return False
            self.perform(queue)
        group.waits_for = None
        self._deliver(group, target)
        self.cta.clocks.learn(group.warps, self.cta.clocks.wgmma + int(group.warps[0]) // 4, target)
        self.cta.note("wgmma awaited", group, target=target, pending=pending)
        return True

    def waiting(self) -> list[Queue]:
        """Queues with complete operations that somebody waits for."""
        return [queue for queue in self.queues if queue.wanted > queue.done]

    def perform(self, queue: Queue) -> None:
        """Complete what is wanted: read shared memory now and add up."""
        operations = queue.operations[queue.done : queue.wanted]
        start = 0
        while start < len(operations):
            end = start + 1
            while end < len(operations) and _joinable(operations[start], operations[end]):
                end += 1
            self._multiply(operations[start:end])
            start = end
        for operation in operations:
            operation.a_rows = operation.a_chunks = operation.b_chunks = None
        queue.done = queue.wanted
        self.cta.progress += 1
        self.cta.note("wgmma complete", None, queue=queue)

    def check_end(self, group: Any) -> None:
        """Raise a Hazard when a warp ends with products in flight."""
        if group.in_flight:
            raise Hazard(Kind.UNFINISHED, "a warp ends while wgmma.mma_async operations of it are in flight")

    # ------------------------------------------------------------------ parts

    def _queue(self, group: Any) -> tuple[Queue, int]:
        warpgroup = int(group.warps[0]) // 4
        if int(group.warps[-1]) // 4 != warpgroup:
            raise OutsideModel("a wgmma across two warpgroups in one vector; run with schedules of single warpgroups")
        return self.queues[warpgroup], int(group.warps[0]) % 4

    def _find_operands(self, operation: Operation) -> None:
        """Find the operands in shared memory."""
        shape, memory = operation.shape, self.cta.shared
        operands = [("B", operation.b_descriptor, shape.n, shape.b_mn_major)]
        if operation.a_descriptor is not None:
            operands.append(("A", operation.a_descriptor, M, shape.a_mn_major))
        for name, descriptor, rows, mn_major in operands:
            chunks = operand_chunks(descriptor, rows, mn_major)
            memory.check_chunks(chunks, f"operand {name} of a wgmma")
            if name == "A":
                operation.a_chunks = chunks
            else:
                operation.b_chunks = chunks

    def _note_reads(self, group: Any, operation: Operation, number: int) -> None:
        """Note that the operands are being read, which each of the warps has to have waited for.

        Once a warp has issued the product, its operands are being read until all have: who writes to them is reported.
        So for later warps their state is what the first one found, but where mbarriers are made.
        """
        memory, agent = self.cta.shared, self.cta.clocks.wgmma + int(group.warps[0]) // 4
        visible = self.cta.clocks.visible_to_async(group.warps)
        written = operation.written
        if written is not None and operation.guards == memory.guards and not some(written > visible[: len(written)]):
            return
        for name, chunks in (("B", operation.b_chunks), ("A", operation.a_chunks)):
            if chunks is not None:
                what = f"operand {name} of a wgmma"
                memory.async_read(chunks.reshape(-1), 16, group.warps, agent, number + 1, what, visible)
        if len(group.warps) < 4:
            operands = [chunks.reshape(-1) for chunks in (operation.b_chunks, operation.a_chunks) if chunks is not None]
            operation.written, operation.guards = memory.latest_writes(np.concatenate(operands), 16), memory.guards

    @staticmethod
    def _check_same(
        operation: Operation, shape: Shape, a_descriptor: int | None, b_descriptor: int, accumulates: bool
    ) -> None:
        mine = (shape.instruction, a_descriptor, b_descriptor, accumulates)
        theirs = (
            operation.shape.instruction,
            operation.a_descriptor,
            operation.b_descriptor,
            operation.accumulate,
        )
        if mine != theirs:
            raise Hazard(
                Kind.WARPGROUP_DIVERGENCE,
                f"this warp issues (instruction, A, B, scale-d) = {mine}, another warp of its warpgroup {theirs}",
            )

    def _accumulators(self, group: Any, operation: Operation, accumulators: tuple[Any, ...], chained: bool) -> None:
        """Take over the accumulators' values where no product is in flight on them."""
        token = operation.token
        if chained:
            if set(map(id, accumulators)) != {id(token)}:
                raise Hazard(
                    Kind.REGISTER_IN_FLIGHT,
                    "the accumulator registers of this wgmma belong to different unfinished ones",
                )
            return
        held = set(map(type, accumulators))
        if type(None) in held:
            raise Hazard(Kind.UNINITIALISED_REGISTER, "a wgmma accumulates on registers that were never written")
        if InFlight in held:
            raise Hazard(
                Kind.REGISTER_IN_FLIGHT, "some accumulator registers of this wgmma belong to an unfinished one"
            )
        vectors = [spread(value, group.lanes) for value in accumulators]
        token.value[_rows(group)] = accumulator_matrix(vectors, operation.shape.accumulator)

    def _fragments(self, group: Any, operation: Operation, registers: tuple[Any, ...]) -> None:
        if any(value is None for value in registers):
            raise Hazard(Kind.UNINITIALISED_REGISTER, "a wgmma reads A from registers that were never written")
        vectors = [spread(value, group.lanes) for value in registers]
        matrix = fragment_matrix(vectors, operation.shape.a_type)
        if operation.a_rows is None:
            operation.a_rows = np.zeros((M, matrix.shape[1]), np.float32)
        operation.a_rows[_rows(group)] = matrix

    def _multiply(self, run: Sequence[Operation]) -> None:
        """Products on one accumulator, one after the other, as a single longer product."""
        shape, chunks = run[0].shape, self.cta.shared.chunks
        if shape.fragment_registers:
            a = np.concatenate([operation.a_rows for operation in run if operation.a_rows is not None], axis=1)
        else:
            a = read_operand(chunks, [operation.a_chunks for operation in run], shape.a_type, shape.a_mn_major)
        b = read_operand(chunks, [operation.b_chunks for operation in run], shape.b_type, shape.b_mn_major)
        token = run[0].token
        if self.cta.launch.sums == "tensor_core":
            signed = -a if shape.negate_a != shape.negate_b else a
            types = shape.a_type, shape.b_type
            token.value = add_products(signed, b, token.value, types=types, accumulator=shape.accumulator)
            return
        product = (a.astype(np.float64) @ b.T.astype(np.float64)).astype(np.float32)
        token.value = token.value - product if shape.negate_a != shape.negate_b else token.value + product
        if shape.accumulator == "f16":
            token.value = token.value.astype(np.float16).astype(np.float32)

    def _deliver(self, group: Any, target: int) -> None:
        """Put the sums of finished products into the group's registers."""
        remaining = []
        for token, shape in group.in_flight:
            if token.operations > target:
                remaining.append((token, shape))
                continue
            # A later product without scale-d may have taken the registers over; those nobody reads are not kept.
            if all(group.registers[number] is not token for number in shape.accumulator_registers):
                continue
            vectors = accumulator_vectors(token.value[_rows(group)], shape.accumulator)
            for number, vector in zip(shape.accumulator_registers, vectors, strict=True):
                if group.registers[number] is token:
                    group.registers[number] = vector.view(self.cta.program.types[number])
        group.in_flight = remaining
        group.fragments_in_flight = [entry for entry in group.fragments_in_flight if entry[0] >= target]


def _rows(group: Any) -> Any:
    """Rows of the 64 that the group's warps hold: 16 each."""
    if len(group.warps) == 4:
        return slice(None)
    return ((group.warps % 4)[:, None] * 16 + np.arange(16)).ravel()


def _joinable(first: Operation, second: Operation) -> bool:
    """Whether two operations may be one matrix product: the same accumulators, the second adding to the first."""
    a, b = first.shape, second.shape
    return (
        second.token is first.token
        and second.accumulate
        and (a.n, a.a_type, a.b_type, a.negate_a, a.negate_b, a.a_mn_major, a.b_mn_major)
        == (b.n, b.a_type, b.b_type, b.negate_a, b.negate_b, b.a_mn_major, b.b_mn_major)
        and bool(a.fragment_registers) == bool(b.fragment_registers)
        and a.accumulator == "f32"
    )


# ---------------------------------------------------------------------- shared memory operands


def swizzled(address: NDArray[np.int64], bits: int) -> NDArray[np.int64]:
    """Physical address: the number of the 16-byte chunk, XORed with the row within 8 (absolute address bits)."""
    return address ^ (((address >> 7) & ((1 << bits) - 1)) << 4)


@functools.lru_cache(maxsize=4096)
def operand_chunks(descriptor: int, rows: int, mn_major: bool) -> NDArray[np.intp]:
    """Numbers of the 16-byte chunks of an operand tile of 32 bytes along K.

    K-major: (rows, 2), a chunk is 16 bytes along K. MN-major, 16-bit elements: (16, rows / 8), a chunk is 8 elements
    along M or N. PTX ISA, "Matrix Descriptor Format" and "Strides" of the canonical layouts.
    """
    start = (descriptor & 0x3FFF) << 4
    leading = (descriptor >> 16 & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    code = descriptor >> 62 & 3
    if descriptor >> 49 & 7:
        raise OutsideModel(
            f"wgmma descriptor {descriptor:#018x} has a base offset; align the tile to its swizzle pattern"
        )
    span = SWIZZLE_SPAN[code]
    if not mn_major:
        row, chunk = np.arange(rows)[:, None], np.arange(2)[None, :]
        if code == 0:
            offset = row % 8 * 16 + row // 8 * stride + chunk * leading
        else:
            offset = row % 8 * span + row // 8 * stride + chunk * 16
    else:
        k, chunk = np.arange(16)[:, None], np.arange(rows // 8)[None, :]
        if code == 0:
            offset = chunk * stride + k % 8 * 16 + k // 8 * leading
        else:
            width = span // 16
            offset = chunk % width * 16 + chunk // width * leading + k % 8 * span + k // 8 * stride
    return (swizzled(start + offset, SWIZZLE_BITS[code]) >> 4).astype(np.intp)


def read_operand(
    memory: NDArray[np.complex128], tiles: Sequence[NDArray[np.intp] | None], type_name: str, mn_major: bool
) -> Matrix:
    """Operand tiles side by side along K as float32, (rows, K)."""
    present = [tile for tile in tiles if tile is not None]
    if mn_major:  # 16-bit elements only
        return decode(memory[np.concatenate(present, axis=0)].view(np.uint8), type_name).T
    return decode(memory[np.concatenate(present, axis=1)].view(np.uint8), type_name)


def decode(data: NDArray[np.uint8], type_name: str) -> Matrix:
    """Bytes (rows, bytes) as float32 (rows, elements)."""
    if type_name == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if type_name == "f16":
        return data.view(np.float16).astype(np.float32)
    return FP8_VALUES[type_name][data]


# ---------------------------------------------------------------------- register fragments


def accumulator_vectors(matrix: Matrix, type_name: str) -> list[NDArray[Any]]:
    """(16 x warps, N) as registers, one vector of lanes each. PTX ISA, "Register Fragments", D.

    Register i of lane l of warp w: row 16 w + l / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (l % 4) + i % 2; f16 holds
    two neighbouring columns in one register.
    """
    warps, n = matrix.shape[0] // 16, matrix.shape[1]
    # (warp, row half, lane / 4, column block, lane % 4, pair)
    parts = matrix.reshape(warps, 2, 8, n // 8, 4, 2)
    if type_name == "f16":
        halves = np.ascontiguousarray(parts.astype(np.float16)).view(np.uint32)[..., 0]
        return list(np.ascontiguousarray(halves.transpose(3, 1, 0, 2, 4)).reshape(n // 4, warps * 32))
    return list(np.ascontiguousarray(parts.transpose(3, 1, 5, 0, 2, 4)).reshape(n // 2, warps * 32))


def accumulator_matrix(vectors: Sequence[NDArray[Any]], type_name: str) -> Matrix:
    """The inverse of `accumulator_vectors`."""
    warps = len(vectors[0]) // 32
    if type_name == "f16":
        halves = joined(vectors, np.uint32).reshape(len(vectors) // 2, 2, warps, 8, 4).transpose(2, 1, 3, 0, 4)
        pairs = np.ascontiguousarray(halves)[..., None].view(np.float16).astype(np.float32)
        return pairs.reshape(16 * warps, 4 * len(vectors))
    parts = joined(vectors, np.float32).reshape(len(vectors) // 4, 2, 2, warps, 8, 4).transpose(3, 1, 4, 0, 5, 2)
    return np.ascontiguousarray(parts).reshape(16 * warps, 2 * len(vectors))


def joined(vectors: Sequence[NDArray[Any]], type_: Any) -> NDArray[Any]:
    """Registers of 32 bits, one after the other, read as one type; mostly all are held in one."""
    if len({vector.dtype for vector in vectors}) > 1:
        vectors = [vector.view(type_) for vector in vectors]
    return np.concatenate(vectors).view(type_)


def fragment_matrix(vectors: Sequence[NDArray[Any]], type_name: str) -> Matrix:
    """Four registers of A as (16 x warps, K) float32. PTX ISA, "Register Fragments", A.

    Register j: row 16 w + l / 4 + 8 (j % 2), bytes 4 (l % 4) to 4 (l % 4) + 3 of K block j / 2, which has 16 bytes.
    """
    warps = len(vectors[0]) // 32
    # (k block, row half, warp, lane / 4, lane % 4) -> (warp, row half, lane / 4, k block, lane % 4)
    rows = np.ascontiguousarray(joined(vectors, np.uint32).reshape(2, 2, warps, 8, 4).transpose(2, 1, 3, 0, 4))
    return decode(rows.reshape(16 * warps, 8).view(np.uint8), type_name)
