"""TMA loads and stores of every rank, swizzle and overhang, element by element; transaction counts and bulk groups."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from machine import LEADER, Machine, aligned, clean, hazards, refused, tensor_map, wait

from fa3gen.cpu.findings import Hazard, Kind, OutsideModel

COVERED = {
    "tensor_load": "test_load",
    "tensor_store": "test_store",
    "bulk_commit": "test_store_groups",
    "bulk_wait": "test_store_groups",
    "prefetch_map": "test_prefetches_change_nothing",
    "prefetch": "test_prefetches_change_nothing",
}

ELEMENTS = {"u8": np.uint8, "u16": np.uint16, "bf16": np.uint16, "f16": np.uint16, "f32": np.float32, "u64": np.uint64}
BOX = 1024  # shared byte where a box begins, a multiple of every swizzle's pattern


# ---------------------------------------------------------------------- the model


def swizzled_offset(offset: int, swizzle: int) -> int:
    """Byte of shared memory, from a start aligned to 1024, of byte `offset` of a box (PTX ISA, "Swizzling Modes").

    The 16-byte chunk within a row of `swizzle` bytes is XORed with the number of the 128-byte line, modulo the chunks.
    """
    if swizzle == 0:
        return offset
    chunk, line = offset // 16 % (swizzle // 16), offset // 128
    return offset - 16 * chunk + 16 * (chunk ^ line % (swizzle // 16))


def elements_of_box(box: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Indices of a box, dimension 0 fastest."""
    for reverse in itertools.product(*(range(extent) for extent in reversed(box))):
        yield tuple(reversed(reverse))


def loaded_box(tensor: np.ndarray, box: tuple[int, ...], at: tuple[int, ...], swizzle: int) -> bytes:
    """What a load leaves in shared memory; elements outside the tensor are zero."""
    element = tensor.itemsize
    memory = bytearray(int(np.prod(box)) * element)
    for number, index in enumerate(elements_of_box(box)):
        place = tuple(first + step for first, step in zip(at, index, strict=True))
        inside = all(0 <= x < extent for x, extent in zip(place, reversed(tensor.shape), strict=True))
        value = tensor[tuple(reversed(place))].tobytes() if inside else bytes(element)
        start = swizzled_offset(number * element, swizzle)
        memory[start : start + element] = value
    return bytes(memory)


def stored_box(tensor: np.ndarray, box: tuple[int, ...], at: tuple[int, ...], swizzle: int, memory: bytes) -> None:
    """Write the part of a box in shared memory that lies inside the tensor."""
    element = tensor.itemsize
    for number, index in enumerate(elements_of_box(box)):
        place = tuple(first + step for first, step in zip(at, index, strict=True))
        if all(0 <= x < extent for x, extent in zip(place, reversed(tensor.shape), strict=True)):
            start = swizzled_offset(number * element, swizzle)
            tensor[tuple(reversed(place))] = np.frombuffer(memory[start : start + element], tensor.dtype)[0]


# ---------------------------------------------------------------------- kernels


def initialised(count: int = 1, barriers: int = 1) -> str:
    """Thread 0 initialises mbarriers at shared bytes 0, 8 and so on; all threads may use them."""
    inits = " ".join(f"mbarrier.init.shared.b64 [%s+{8 * number}], {count};" for number in range(barriers))
    return f"{LEADER}@!%p30 bra ready;\n{inits}\nfence.mbarrier_init.release.cluster;\nready:\nbar.sync 0;\n"


def copy_chunks(size: int, direction: str) -> str:
    """Copy `size` bytes between shared byte BOX and the buffer `bytes`, 16 at a time."""
    shared, memory = "ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r3]", "ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd3]"
    if direction == "out":
        memory = "st.global.v4.b32 [%rd3], {%r4, %r5, %r6, %r7}"
    else:
        shared = "st.shared.v4.b32 [%r3], {%r4, %r5, %r6, %r7}"
    first, second = (shared, memory) if direction == "out" else (memory, shared)
    return f"""
        shl.b32 %r2, %t, 4;
    {direction}_more:
        setp.ge.u32 %p1, %r2, {size};
        @%p1 bra {direction}_done;
        add.u32 %r3, %r2, %s; cvt.u64.u32 %rd3, %r2; add.u64 %rd3, %rd3, %bytes;
        add.u32 %r3, %r3, {BOX};
        {first};
        {second};
        add.u32 %r2, %r2, 512;
        bra.uni {direction}_more;
    {direction}_done:
    """


def operand(at: tuple[int, ...]) -> str:
    return "{" + ", ".join(str(coordinate) for coordinate in at) + "}"


LOADS = [
    "cp.async.bulk.tensor.{}d.shared::cta.global.tile.mbarrier::complete_tx::bytes [{}], [%box, {}], [%s];",
    "cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes [{}], [%box, {}], [%s];",
    "cp.async.bulk.tensor.{}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[{}], [%box, {}], [%s], %rd9;",
]
STORES = [
    "cp.async.bulk.tensor.{}d.global.shared::cta.tile.bulk_group [%box, {}], [{}];",
    "cp.async.bulk.tensor.{}d.global.shared::cta.bulk_group [%box, {}], [{}];",
    "cp.async.bulk.tensor.{}d.global.shared::cta.tile.bulk_group.L2::cache_hint [%box, {}], [{}], %rd9;",
]


def load(at: tuple[int, ...], where: str = f"%s+{BOX}", spelling: int = 0) -> str:
    return LOADS[spelling % 3].format(len(at), where, operand(at))


def store(at: tuple[int, ...], where: str = f"%s+{BOX}", spelling: int = 0) -> str:
    return STORES[spelling % 3].format(len(at), operand(at), where)


def load_kernel(size: int, at: tuple[int, ...], spelling: int) -> str:
    return f"""
        {initialised()} mov.b64 %rd9, 0;
        @!%p30 bra issued;
        mbarrier.arrive.expect_tx.shared.b64 _, [%s], {size};
        {load(at, spelling=spelling)}
    issued:
        {wait("%s", 0, "spin")}
        {copy_chunks(size, "out")}
    """


def store_kernel(size: int, at: tuple[int, ...], spelling: int) -> str:
    return f"""
        {copy_chunks(size, "in")}
        fence.proxy.async.shared::cta;
        bar.sync 0;
        {LEADER} mov.b64 %rd9, 0;
        @!%p30 bra end;
        {store(at, spelling=spelling)}
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
    end:
    """


# ---------------------------------------------------------------------- every rank, swizzle and side

# (element type, extents of the tensor, dimension 0 first, box); a row of the box is as wide as the swizzle.
SHAPES: dict[int, list[tuple[str, tuple[int, ...], tuple[int, ...]]]] = {
    0: [
        ("u8", (100,), (32,)),
        ("f32", (30, 9), (12, 5)),
        ("bf16", (20, 5, 4), (8, 3, 2)),
        ("f16", (21, 3, 2, 3), (16, 2, 2, 2)),
        ("u64", (5, 3, 2, 2, 3), (2, 2, 1, 2, 2)),
    ],
    32: [("u8", (70, 12), (32, 9)), ("bf16", (30, 9, 3, 2), (16, 9, 2, 1)), ("f32", (11, 3, 3, 2, 2), (8, 3, 2, 1, 2))],
    64: [("f32", (20, 12), (16, 11)), ("u16", (40, 5, 3), (32, 9, 2)), ("f16", (40, 3, 2, 3), (32, 3, 2, 2))],
    128: [("bf16", (90, 30), (64, 20)), ("u8", (130, 6, 3), (128, 5, 3)), ("f32", (40, 3, 4, 2), (32, 2, 3, 2))],
}
CASES = [(swizzle, *shape) for swizzle, shapes in SHAPES.items() for shape in shapes]


def corners(dims: tuple[int, ...], box: tuple[int, ...], itemsize: int) -> list[tuple[int, ...]]:
    """Places of a box: inside, over each side of each dimension, over all, and wholly outside.

    Along the contiguous dimension a box begins at a multiple of 16 bytes.
    """
    step = 16 // itemsize
    inside = tuple(
        min(1, extent - 1) if extent <= size else (extent - size) // 2 for extent, size in zip(dims, box, strict=True)
    )
    places = [(0,) * len(dims), inside]
    for dimension, (extent, size) in enumerate(zip(dims, box, strict=True)):
        for overhang in (-1 if size > 1 else -size, extent - size + 1):
            places.append((*inside[:dimension], overhang, *inside[dimension + 1 :]))
    places.append(tuple(-(size // 2) for size in box))
    places.append(tuple(extent - size // 2 for extent, size in zip(dims, box, strict=True)))
    places.append((*inside[:-1], dims[-1]))
    places.append((-box[0], *inside[1:]))
    return [(place[0] // step * step, *place[1:]) for place in places]


def tensor(type_: str, dims: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(the buffer, the tensor in it): rows are padded to 16 bytes, and there is one more of each outer extent."""
    dtype = np.dtype(ELEMENTS[type_])
    row = -(-dims[0] * dtype.itemsize // 16) * 16 // dtype.itemsize
    buffer = aligned((*(extent + 1 for extent in reversed(dims[1:])), row), dtype)
    generator = random.Random(str(dims))
    buffer.view(np.uint8).reshape(-1)[:] = [generator.randrange(1, 120) for _ in range(buffer.nbytes)]
    return buffer, buffer[tuple(slice(extent) for extent in reversed(dims))]


def names(value: object) -> str:
    return str(value).replace(" ", "")


@pytest.mark.parametrize(("swizzle", "type_", "dims", "box"), CASES, ids=names)
def test_load(swizzle: int, type_: str, dims: tuple[int, ...], box: tuple[int, ...]) -> None:
    buffer, inner = tensor(type_, dims)
    size = int(np.prod(box)) * buffer.itemsize
    out = aligned((size,), np.uint8)
    for number, at in enumerate(corners(dims, box, buffer.itemsize)):
        machine = Machine(
            load_kernel(size, at, number),
            shared=BOX + size,
            buffers={"tensor": buffer, "bytes": out},
            maps={"box": tensor_map(inner, type_, box, swizzle)},
        )
        assert machine.run()["bytes"].tobytes() == loaded_box(inner, box, at, swizzle), at


@pytest.mark.parametrize(("swizzle", "type_", "dims", "box"), CASES, ids=names)
def test_store(swizzle: int, type_: str, dims: tuple[int, ...], box: tuple[int, ...]) -> None:
    """A box may reach past the end; one that begins before the tensor is refused."""
    buffer, inner = tensor(type_, dims)
    size = int(np.prod(box)) * buffer.itemsize
    memory = aligned((size,), np.uint8)
    memory[:] = np.frombuffer(bytes(random.Random(7).randrange(1, 120) for _ in range(size)), np.uint8)
    for number, at in enumerate(corners(dims, box, buffer.itemsize)):
        machine = Machine(
            store_kernel(size, at, number),
            shared=BOX + size,
            buffers={"tensor": buffer, "bytes": memory},
            maps={"box": tensor_map(inner, type_, box, swizzle)},
        )
        if min(at) < 0:
            with pytest.raises(Hazard, match="a store's may not") as report:
                machine.run()
            assert report.value.kind is Kind.OUT_OF_BOUNDS
            continue
        expected = buffer.copy()
        # Along the contiguous dimension a store ends with a whole unit of 16 bytes, which the row of the buffer has.
        whole = (buffer.shape[-1], *dims[1:])
        stored_box(expected[tuple(slice(extent) for extent in reversed(whole))], box, at, swizzle, memory.tobytes())
        assert machine.run()["tensor"].tobytes() == expected.tobytes(), at


@pytest.mark.parametrize("kernel", [load_kernel, store_kernel])
@pytest.mark.parametrize("first", [-1, 1, 34])
def test_box_between_16_byte_steps_is_refused(kernel: Any, first: int) -> None:
    """An H200 stops with an illegal instruction at such a box, also at one inside the tensor."""
    buffer, inner = tensor("bf16", (90, 30))
    memory = aligned((2560,), np.uint8)
    machine = Machine(
        kernel(2560, (first, 3), 0),
        shared=BOX + 2560,
        buffers={"tensor": buffer, "bytes": memory},
        maps={"box": tensor_map(inner, "bf16", (64, 20), 128)},
    )
    with pytest.raises(Hazard, match=f"begins {2 * first} bytes along the contiguous dimension") as report:
        machine.run()
    assert report.value.kind is Kind.MISALIGNED


TILE_M, FAR = 16, 2**30  # rows of a tile below; where its sequence ends, in the dimension that cuts it


@pytest.mark.parametrize(("first", "rows"), [(0, 16), (0, 1), (3, 5), (10, 16), (19, 7), (25, 1), (26, 0), (30, 0)])
def test_tile_that_is_cut_at_the_end_of_its_sequence(first: int, rows: int) -> None:
    """Rows of x by way of (ROW, FAR, rows of x + 1, FAR + 1) elements, the last with a stride of 2^34 less a row's.

    The box at (0, FAR - rows, first + rows, FAR) begins at row `first` of x, 2^64 bytes around, and is cut after `rows`
    rows, wherever that is in x. No coordinate is negative, so that a store may do the same.
    """
    row, height = 64, 26
    buffer, around = tensor("bf16", (row, height + TILE_M - 1))
    x, stride = around[:height], buffer.strides[0]
    maps = {"box": far_map(x, (FAR + 1, height + 1, FAR, row), (2**34 - stride, stride, stride), (row, TILE_M))}
    size, at = row * TILE_M * 2, (0, FAR - rows, first + rows, FAR)
    memory = aligned((size,), np.uint8)
    given = {"shared": BOX + size, "maps": maps, "buffers": {"tensor": buffer, "bytes": memory}}

    wanted = np.zeros((TILE_M, row), np.uint16)
    wanted[:rows] = x[first : first + rows]
    assert clean(load_kernel(size, at, 0), **given)["bytes"].tobytes() == loaded_box(wanted, (row, TILE_M), (0, 0), 128)

    memory[:] = 200
    expected = buffer.copy()
    expected[first : first + rows, :row] = 200 * 257
    assert clean(store_kernel(size, at, 0), **given)["tensor"].tobytes() == expected.tobytes()


def far_map(x: np.ndarray, dims: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> bytes:
    """A map of other dimensions than those of x (the slowest first), over the same memory."""
    data = bytearray(tensor_map(np.empty((2, 2, *x.shape), x.dtype), "bf16", (*box, 1, 1), 128))
    words = list(struct.unpack_from("<8Q", data))
    words[0] = x.ctypes.data
    words[1] = words[1] & 0xFFFFFFFF | (strides[2] >> 4) << 32  # the span, modulo 2^64, is a small one
    words[2] = strides[1] >> 4 | (strides[0] >> 4 & 0xFFFFFFFF) << 32
    words[4] = dims[3] - 1 | (dims[2] - 1) << 32
    words[5] = dims[1] - 1 | (dims[0] - 1) << 32
    struct.pack_into("<8Q", data, 0, *words)
    return bytes(data)


@pytest.mark.parametrize("kernel", [load_kernel, store_kernel])
def test_a_map_that_begins_outside_the_tensors_is_refused(kernel: Any) -> None:
    """An H200 stops with an illegal memory access where nothing is mapped, although the box lies in the tensor."""
    whole, memory = aligned((40, 64), np.uint16), aligned((2048,), np.uint8)
    given = {"shared": BOX + 2048, "maps": {"box": tensor_map(whole, "bf16", (64, 16), 128)}}
    body = kernel(2048, (0, 8), 0)
    clean(body, count=2, buffers={"tensor": whole, "bytes": memory}, **given)
    words = "a tensor map that begins at 0x.*in no tensor of the launch"
    refused(body, Kind.OUT_OF_BOUNDS, words, count=2, buffers={"tensor": whole[8:], "bytes": memory}, **given)


def test_both_ways_under_every_schedule() -> None:
    """A load, a change by all threads, and a store."""
    buffer, inner = tensor("bf16", (90, 30))
    body = load_kernel(64 * 20 * 2, (40, 20), 0).replace(copy_chunks(2560, "out"), "") + f"""
        shl.b32 %r2, %t, 2; add.u32 %r2, %r2, %s;
    add_one:
        ld.shared.b32 %r3, [%r2+{BOX}]; add.u32 %r3, %r3, 65537; st.shared.b32 [%r2+{BOX}], %r3;
        add.u32 %r2, %r2, 256; add.u32 %r4, %s, 2560; setp.lt.u32 %p1, %r2, %r4;
        @%p1 bra add_one;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        @!%p30 bra end;
        {store((40, 20))}
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0;
    end:
    """
    expected = buffer.copy()
    expected[20:30, 40:90] += 1
    expected[20:30, 90:96] = 1  # zeros were loaded; a store ends with a whole unit of 16 bytes
    maps = {"box": tensor_map(inner, "bf16", (64, 20), 128)}
    after = clean(body, threads=64, shared=4096, buffers={"tensor": buffer}, maps=maps)
    assert after["tensor"].tobytes() == expected.tobytes()


# ---------------------------------------------------------------------- transactions

LINE = {"buffers": {"tensor": aligned((64,), np.uint32), "out": np.zeros(8, np.uint32)}, "shared": 4096}
LINE["maps"] = {"box": tensor_map(LINE["buffers"]["tensor"], "u32", (16,))}  # a box has 64 bytes


def test_bytes_of_several_loads() -> None:
    """A phase ends when all expected bytes have landed and all have arrived; the next one counts anew."""
    body = f"""
        {initialised()}
        @!%p30 bra issued;
        mbarrier.arrive.expect_tx.shared.b64 _, [%s], 128;
        {load((0,))} {load((16,), f"%s+{BOX + 128}")}
    issued:
        {wait("%s", 0, "first")}
        ld.shared.b32 %r1, [%s+{BOX}]; ld.shared.b32 %r2, [%s+{BOX + 128}];
        bar.sync 0;
        @!%p30 bra again;
        mbarrier.expect_tx.shared.b64 [%s], 64;
        {load((32,))}
        mbarrier.arrive.shared.b64 _, [%s];
    again:
        {wait("%s", 1, "second")}
        ld.shared.b32 %r3, [%s+{BOX}];
        @%p30 st.global.v4.b32 [%out], {{%r1, %r2, %r3, %r3}};
    """
    LINE["buffers"]["tensor"][:] = np.arange(64)
    assert clean(body, threads=64, **LINE)["out"][:3].tolist() == [0, 16, 32]


def test_bytes_of_one_load_too_few() -> None:
    """A phase that ends while a load for it is under way is a fault, although the bytes add up for a moment."""
    body = f"""
        {initialised()}
        @!%p30 bra issued;
        mbarrier.arrive.expect_tx.shared.b64 _, [%s], 64;
        {load((0,))} {load((16,), f"%s+{BOX + 128}")}
    issued:
        {wait("%s", 0, "spin")}
    """
    clean(body.replace("[%s], 64;", "[%s], 128;"), threads=64, **LINE)
    refused(body, Kind.TRANSACTION_COUNT, threads=64, **LINE)
    refused(body, Kind.TRANSACTION_COUNT, "64 bytes that signal it are still on their way", count=2, threads=64, **LINE)


def test_lanes_load_boxes_of_their_own() -> None:
    """One instruction of four lanes: four boxes, four destinations, two mbarriers."""
    body = f"""
        {initialised(2, barriers=2)}
        setp.lt.u32 %p1, %t, 4; and.b32 %r1, %t, 1; shl.b32 %r1, %r1, 3; add.u32 %r1, %r1, %s;
        shl.b32 %r2, %t, 4; shl.b32 %r3, %t, 7; add.u32 %r3, %r3, %s;
        @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 64;
        @%p1 {load((0,), f"%r3+{BOX}").replace("{0}", "{%r2}").replace("[%s]", "[%r1]")}
        {wait("%s", 0, "even")} {wait("%s+8", 0, "odd")}
        @%p1 ld.shared.b32 %r4, [%r3+{BOX + 4}]; mad.wide.u32 %rd1, %t, 4, %out;
        @%p1 st.global.b32 [%rd1], %r4;
    """
    LINE["buffers"]["tensor"][:] = np.arange(64)
    assert clean(body, threads=32, **LINE)["out"][:4].tolist() == [1, 17, 33, 49]


# ---------------------------------------------------------------------- groups of stores

TWO_STORES = f"""
    shl.b32 %r1, %t, 2; add.u32 %r1, %r1, %s; setp.lt.u32 %p1, %t, 16; {LEADER}
    @%p1 st.shared.b32 [%r1+{BOX}], %t; @%p1 st.shared.b32 [%r1+{BOX + 128}], %t;
    fence.proxy.async;
    bar.sync 0;
    @!%p30 bra wait_here;
    {store((0,))}
    cp.async.bulk.commit_group;
    {store((16,), f"%s+{BOX + 128}")}
    cp.async.bulk.commit_group;
wait_here:
"""


@pytest.mark.parametrize("suffix", ["", ".read"])
def test_store_groups(suffix: str) -> None:
    """A wait covers all but the latest groups: what they read may be overwritten, the rest may not."""
    end = f"@%p30 cp.async.bulk.wait_group{suffix} 0;"
    for pending, first, second in ((0, True, True), (1, True, False), (2, False, False)):
        for place, allowed in ((BOX, first), (BOX + 128, second)):
            write = f"@%p1 st.shared.b32 [%r1+{place}], 0;"
            body = f"{TWO_STORES}@%p30 cp.async.bulk.wait_group{suffix} {pending};\nbar.sync 0;\n{write}\n{end}"
            if allowed:
                after = clean(body, count=5, threads=64, **LINE)["tensor"]
                assert after.tolist()[:32] == [*range(16), *range(16)]
            else:
                refused(body, Kind.OVERWRITE, "a bulk store of warp 0", at=write, count=5, threads=64, **LINE)


def test_a_wait_is_for_the_groups_of_its_thread() -> None:
    """Another lane's wait waits for nothing."""
    body = f"{TWO_STORES}\nsetp.eq.u32 %p2, %t, 1;\n@%p2 cp.async.bulk.wait_group 0;"
    refused(body, Kind.UNFINISHED, "warp 0 ends with TMA stores", count=5, threads=64, **LINE)


def test_uncommitted_stores_are_not_waited_for() -> None:
    body = (
        TWO_STORES.replace("cp.async.bulk.commit_group;\nwait_here", "wait_here") + "@%p30 cp.async.bulk.wait_group 0;"
    )
    assert body.count("commit_group") == 1
    refused(body, Kind.UNFINISHED, "warp 0 ends with TMA stores", count=5, threads=64, **LINE)


def test_lanes_of_a_warp_store_a_box_once() -> None:
    """All lanes issue the store, one copy is made."""
    body = TWO_STORES.replace("@!%p30 bra wait_here;", "setp.lt.u32 %p2, %t, 32;\n@!%p2 bra wait_here;")
    body += "cp.async.bulk.wait_group 0;"
    assert clean(body, threads=64, **LINE)["tensor"].tolist()[:32] == [*range(16), *range(16)]


# ---------------------------------------------------------------------- the rest


@pytest.mark.parametrize(
    "instruction",
    ["prefetch.tensormap [%box]", "prefetch.param.tensormap [%box]", "prefetch.global.L2 [%tensor]"]
    + ["prefetch.L1 [%tensor]", "prefetch.global.L1 [%tensor]"],
)
def test_prefetches_change_nothing(instruction: str) -> None:
    before = LINE["buffers"]["tensor"].tolist()
    assert clean(f"{instruction};", count=2, **LINE)["tensor"].tolist() == before


def test_boxes_outside_the_model() -> None:
    """Rows narrower than the swizzle are refused, not guessed."""
    buffer, inner = tensor("bf16", (90, 30))
    maps = {"box": tensor_map(inner, "bf16", (32, 8), 128)}
    machine = Machine(load_kernel(512, (0, 0), 0), shared=4096, buffers={"tensor": buffer, "bytes": buffer}, maps=maps)
    with pytest.raises(OutsideModel, match="rows of 64 bytes and a swizzle of 128 bytes"):
        machine.run()


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ((f"[%s+{BOX}]", f"[%s+{BOX + 64}]"), Kind.MISALIGNED, "needs a multiple of 128"),
        ((f"[%s+{BOX}]", "[%s+4096]"), Kind.OUT_OF_BOUNDS, "shared bytes 4096 to 4160 of 4096"),
        (("[%box, {0}]", "[%box, {0, 0}]"), Kind.TENSOR_MAP, "2 coordinates for a tensor map of rank 1"),
        (("[%box, ", "[%tensor, "), Kind.TENSOR_MAP, "no tensor map at"),
    ],
)
def test_bad_boxes(change: tuple[str, str], kind: Kind, words: str) -> None:
    """Found in loads and in stores."""
    for kernel in (load_kernel(64, (0,), 0), store_kernel(64, (0,), 0)):
        assert kernel.count(change[0]) == 1
        changed = kernel.replace(*change).replace("tensor.1d", "tensor.2d" if "0, 0" in change[1] else "tensor.1d")
        settings = {**LINE, "buffers": {**LINE["buffers"], "bytes": aligned((64,), np.uint8)}}
        refused(changed, kind, words, count=3, **settings)


def test_a_tensor_outside_the_allocations() -> None:
    """A map may describe memory that no tensor of the launch has."""
    buffer = aligned((64,), np.uint32)
    settings = {**LINE, "buffers": {"tensor": buffer[:32], "bytes": aligned((64,), np.uint8)}}
    maps = {"box": tensor_map(buffer, "u32", (16,))}
    for at, bad in (((16,), False), ((20,), True), ((32,), True)):
        found = hazards(load_kernel(64, at, 0), count=3, **{**settings, "maps": maps})
        assert [hazard.kind if hazard else None for hazard in found] == [Kind.OUT_OF_BOUNDS if bad else None] * 3
