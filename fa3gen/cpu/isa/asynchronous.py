"""Asynchronous copies and warpgroup products (PTX ISA, "cp.async", "cp.async.bulk.tensor", "wgmma")."""

from __future__ import annotations

import re
from itertools import takewhile

from fa3gen.cpu.emitter import Emitter
from fa3gen.cpu.forms import emits
from fa3gen.cpu.ptx import Address, Immediate, Instruction, Operand, PtxError, Vector, registers_in
from fa3gen.cpu.types import PRED, S32, S64, U32, U64
from fa3gen.cpu.wgmma import Shape

_CACHE_HINT = r"(?:\.L2::cache_hint)?"


@emits(
    r"cp\.async\.(?P<cache>ca|cg)\.shared(?:::cta)?\.global(?:\.L2::(?:64B|128B|256B))?",
    destinations=0,
    observable=True,
)
def copy(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """`[destination], [source], width{, size}`: the bytes past `size` are zero. With it go those right behind it."""
    allowed = (16,) if form["cache"] == "cg" else (4, 8, 16)
    width = instruction.operands[2]
    if not isinstance(width, Immediate) or width.value not in allowed:
        raise PtxError(f"PTX line {instruction.line}: cp.async.{form['cache']} copies {allowed} bytes only")
    alike = takewhile(lambda one: one.operands[2] == width, emitter.alike(instruction))
    emitter.together = [instruction, *alike]
    lanes, together = [emitter.temporary() for _ in emitter.together], emitter.temporary()
    for one, name in zip(emitter.together, lanes, strict=True):
        emitter.instruction = one
        destination, source, _, *rest = one.operands
        size = emitter.read(rest[0], U32) if rest else emitter.constant(width.value, U32)
        what = f"{emitter.address(destination)}, {emitter.address(source)}, {size}"
        emitter.emit(f"{name} = g.cta.cp_async.lanes(g, {what}, {emitter.mask()})")
    how = f"{width.value}, {emitter.mask()}"
    emitter.emit(f"{together} = g.cta.cp_async.issue_together(g, [{', '.join(lanes)}], {how})")
    for one, name in zip(emitter.together, lanes, strict=True):
        emitter.instruction = one
        emitter.emit(f"if not {together}: g.cta.cp_async.issue(g, {name}, {how})")


@emits(r"cp\.async\.commit_group", destinations=0)
def copy_commit(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """Closes a group of copies."""
    emitter.emit(f"g.cta.cp_async.commit(g, {emitter.mask()})")


@emits(r"cp\.async\.wait_group", destinations=0, observable=True)
def copy_wait(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """Waits for all but the latest groups."""
    emitter.emit(f"g.cta.cp_async.wait(g, {_count(instruction)}, {emitter.mask()})")


@emits(r"cp\.async\.wait_all", destinations=0, observable=True)
def copy_wait_all(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """Waits for everything."""
    emitter.emit(f"g.cta.cp_async.wait_all(g, {emitter.mask()})")


@emits(
    r"cp\.async\.bulk\.tensor\.(?P<rank>[1-5])d\.shared::(?:cta|cluster)\.global(?:\.tile)?"
    rf"\.mbarrier::complete_tx::bytes{_CACHE_HINT}",
    destinations=0,
    observable=True,
)
def tensor_load(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """`[destination], [map, {coordinates}], [mbarrier]{, cache policy}`."""
    destination, source, barrier, *_ = instruction.operands
    box, coordinates = _tensor(emitter, source, form)
    emitter.emit(
        f"g.cta.bulk.load(g, {emitter.address(destination)}, {box}, {coordinates}, {emitter.address(barrier)}, "
        f"{emitter.mask()})"
    )


@emits(
    r"cp\.async\.bulk\.tensor\.(?P<rank>[1-5])d\.global\.shared::cta(?:\.tile)?\.bulk_group" + _CACHE_HINT,
    destinations=0,
    observable=True,
)
def tensor_store(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """`[map, {coordinates}], [source]{, cache policy}`."""
    destination, source, *_ = instruction.operands
    box, coordinates = _tensor(emitter, destination, form)
    emitter.emit(f"g.cta.bulk.store(g, {box}, {coordinates}, {emitter.address(source)}, {emitter.mask()})")


@emits(r"cp\.async\.bulk\.commit_group", destinations=0)
def bulk_commit(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """Closes a group of bulk stores."""
    emitter.emit(f"g.cta.bulk.commit(g, {emitter.mask()})")


@emits(r"cp\.async\.bulk\.wait_group(?:\.read)?", destinations=0, observable=True)
def bulk_wait(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """Waits for all but the latest groups of stores."""
    emitter.emit(f"g.cta.bulk.wait(g, {_count(instruction)}, {emitter.mask()})")


@emits(r"prefetch\.(?:param\.)?tensormap", destinations=0)
def prefetch_map(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """The model has no caches."""


@emits(r"prefetch(?:\.global)?\.L[12]", destinations=0)
def prefetch(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """The model has no caches."""


@emits(r"wgmma\.fence\.sync\.aligned", destinations=0, observable=True)
def wgmma_fence(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """Orders register accesses before the products that follow."""
    emitter.flush_touched()
    emitter.emit(f"g.cta.wgmma.fence(g, {emitter.mask()})")


@emits(r"wgmma\.commit_group\.sync\.aligned", destinations=0, observable=True)
def wgmma_commit(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """Closes a group of products."""
    emitter.emit(f"g.cta.wgmma.commit(g, {emitter.mask()})")


@emits(r"wgmma\.wait_group\.sync\.aligned", destinations=0, blocking=True, observable=True)
def wgmma_wait(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """Waits for all but the latest groups of products."""
    emitter.emit(f"if not g.cta.wgmma.wait(g, {_count(instruction)}, {emitter.mask()}): return WAIT")


@emits(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k(?P<k>16|32)\.(?P<d>f32|f16)"
    r"\.(?P<a>bf16|f16|e4m3|e5m2)\.(?P<b>bf16|f16|e4m3|e5m2)",
    accumulates=True,
)
def wgmma(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """`d, a, b, scale-d, scale-a, scale-b{, trans-a}{, trans-b}`; trans-a only for A in shared memory."""
    accumulators, a, b, scale_d, *immediates = instruction.operands
    shape = _shape(emitter, instruction, form, accumulators, a, immediates)
    emitter.flush_touched()
    names = list(registers_in(accumulators))
    held = emitter.raw_registers(names)
    source = (
        "(" + "".join(f"{emitter.read(item, U32)}, " for item in a.items) + ")"
        if isinstance(a, Vector)
        else emitter.read(a, U64)
    )
    emitter.forget_touched()  # reading A for the product itself needs no fence after it
    emitter.assign_registers(
        names,
        f"g.cta.wgmma.issue(g, {emitter.keep(shape)}, {source}, {emitter.read(b, U64)}, "
        f"{emitter.read(scale_d, PRED)}, {held}, {emitter.mask()})",
    )


def _shape(
    emitter: Emitter,
    instruction: Instruction,
    form: re.Match[str],
    accumulators: Operand,
    a: Operand,
    immediates: list[Operand],
) -> Shape:
    """What the instruction says by itself, checked against "Asynchronous wgmma", "Shape" and "Data-types"."""
    n, wide = int(form["n"]), form["a"] in ("bf16", "f16")
    if n % 8 or not 8 <= n <= 256:
        raise PtxError(f"PTX line {instruction.line}: wgmma has no shape n{n}")
    if (form["k"] == "16") != wide or (wide and form["a"] != form["b"]) or (form["a"] == "bf16" and form["d"] == "f16"):
        raise PtxError(f"PTX line {instruction.line}: {instruction.mnemonic} does not exist")
    numbers = tuple(emitter.kernel.numbers[name] for name in registers_in(accumulators))
    fragments = tuple(emitter.kernel.numbers[name] for name in registers_in(a)) if isinstance(a, Vector) else ()
    if len(numbers) != n // (2 if form["d"] == "f32" else 4) or len(fragments) not in (0, 4):
        raise PtxError(f"PTX line {instruction.line}: {instruction.mnemonic} with {len(numbers)} accumulator registers")
    values = [item.value for item in immediates if isinstance(item, Immediate)]
    expected = 2 + (0 if not wide else 1 if fragments else 2)
    if len(values) != expected or not {abs(value) for value in values[:2]} <= {1} or not set(values[2:]) <= {0, 1}:
        raise PtxError(f"PTX line {instruction.line}: wgmma immediates not understood: {values}")
    transposes = values[2:] if wide else [0, 0]
    mask = 0
    for number in (*numbers, *fragments):
        mask |= 1 << number
    return Shape(
        instruction=instruction.index,
        n=n,
        accumulator=form["d"],
        a_type=form["a"],
        b_type=form["b"],
        accumulator_registers=numbers,
        fragment_registers=fragments,
        negate_a=values[0] == -1,
        negate_b=values[1] == -1,
        a_mn_major=bool(transposes[0]) and not fragments,
        b_mn_major=bool(transposes[-1]),
        register_mask=mask,
    )


def _tensor(emitter: Emitter, operand: Operand, form: re.Match[str]) -> tuple[str, str]:
    """(tensor map address, tuple of coordinates) as expressions."""
    if not isinstance(operand, Address) or len(operand.coordinates) != int(form["rank"]):
        raise PtxError(f"PTX line {emitter.instruction.line}: {form['rank']} coordinates expected")
    coordinates = "".join(f"{emitter.read(item, S32)}, " for item in operand.coordinates)
    return emitter.address(Address(operand.base, operand.offset), S64), f"({coordinates})"


def _count(instruction: Instruction) -> int:
    count = instruction.operands[0]
    if not isinstance(count, Immediate):
        raise PtxError(f"PTX line {instruction.line}: a constant number of groups is needed")
    return count.value
