"""Names for places in a CTA's shared memory: the arrays and mbarriers of the plan, stage by stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fa3gen.design import boxes, footprint
from fa3gen.design.cta import cta_of
from fa3gen.hardware import hopper
from fa3gen.spec.model import Combine, Copy, CpAsyncLoad, Forward, Gemm, Quantize, Spec, TmaLoad


@dataclass(frozen=True)
class SharedPlace:
    """One stage of an array, or one mbarrier: bytes [offset, offset + bytes) of dynamic shared memory.

    `stage` is None where there is only one by design.
    """

    name: str
    stage: int | None
    offset: int
    bytes: int

    @property
    def label(self) -> str:
        """`K stage 1` of an array."""
        return self.name if self.stage is None else f"{self.name} stage {self.stage}"

    @property
    def barrier_label(self) -> str:
        """`k_full[1]` of an mbarrier."""
        return self.name if self.stage is None else f"{self.name}[{self.stage}]"


@dataclass(frozen=True)
class SharedPlaces:
    """Arrays and mbarriers of one module; both empty where nothing is known."""

    arrays: tuple[SharedPlace, ...] = ()
    barriers: tuple[SharedPlace, ...] = ()

    @classmethod
    def of(cls, spec: Spec) -> "SharedPlaces":
        """The map that the module's header prints, in the order of its `SharedStorage`: arrays, then mbarriers."""
        match spec:
            case Forward():
                return cls._of_forward(spec)
            case Gemm():
                return cls._of_gemm(spec)
            case Copy():
                return cls._of_copy(spec)
            case Combine() | Quantize():
                placed = cta_of(spec).placed()
                return cls(tuple(SharedPlace(region.name, None, offset, region.bytes) for offset, region in placed))

    @classmethod
    def _of_forward(cls, spec: Forward) -> "SharedPlaces":
        arrays: list[SharedPlace] = []
        offset = 0
        for region in footprint.shared_memory_map(spec):
            offset = -(-offset // region.align) * region.align
            count = _stages(spec, region.name)
            ring, stages = count is not None, count or 1
            size = region.bytes // stages
            for stage in range(stages):
                name = region.name.removeprefix("s")
                arrays.append(SharedPlace(name, stage if ring else None, offset + stage * size, size))
            offset += region.bytes
        return cls(tuple(arrays), tuple(_barriers(spec, offset)))

    @classmethod
    def _of_copy(cls, spec: Copy) -> "SharedPlaces":
        ring, size = spec.ring is not None, boxes.tile_bytes(spec)
        stages = range(boxes.stages(spec))
        arrays = [SharedPlace("X", stage if ring else None, stage * size, size) for stage in stages]
        begin, each = len(stages) * size, hopper.MBARRIER_BYTES
        barriers = [SharedPlace("x_full", stage if ring else None, begin + stage * each, each) for stage in stages]
        return cls(tuple(arrays), tuple(barriers))

    @classmethod
    def _of_gemm(cls, spec: Gemm) -> "SharedPlaces":
        cta, stages = cta_of(spec), spec.load.stages
        arrays = [
            SharedPlace(
                region.name.removeprefix("s"), stage, offset + stage * region.bytes // count, region.bytes // count
            )
            for offset, region in cta.placed()
            if region.name != "barriers"
            for count in [1 if region.name == "sD" else stages]
            for stage in range(count)
        ]
        barriers = [
            SharedPlace(
                f"ab_{role}", stage, offset + (i * stages + stage) * hopper.MBARRIER_BYTES, hopper.MBARRIER_BYTES
            )
            for offset, region in cta.placed()
            if region.name == "barriers"
            for i, role in enumerate(("full", "empty"))
            for stage in range(stages)
        ]
        return cls(tuple(arrays), tuple(barriers))

    def array(self, offset: int) -> str:
        """The array at an offset into dynamic shared memory, in words."""
        found = _containing(self.arrays, offset)
        return f"shared byte {offset}" if found is None else found.label

    def barrier(self, offset: int) -> str:
        """The mbarrier at an offset into dynamic shared memory, in words."""
        found = _containing(self.barriers, offset)
        return f"mbarrier at shared byte {offset}" if found is None else found.barrier_label


def _stages(spec: Forward, array: str) -> int | None:
    """Stages of an array that is a ring, None of another one."""
    if array in ("sK8", "sV8"):
        return spec.kv.stages
    if array in ("sK", "sV", "sVt") and isinstance(spec.load, CpAsyncLoad | TmaLoad):
        return spec.load.kv_stages
    if array == "sQ" and isinstance(spec.load, TmaLoad) and footprint.specialized(spec):
        return spec.load.q_stages
    return footprint.tile_slots(spec) if array == "tiles" else None


def _barriers(spec: Forward, offset: int) -> Iterable[SharedPlace]:
    """q_full, then for each ring its full barriers and its empty ones, in the order of the module's `SharedStorage`.

    In a specialised kernel Q may be a ring, too; K and V of 8 bits have rings before those of what is made of them, V
    transposed one behind.
    """
    if not isinstance(spec.load, TmaLoad):
        return
    size = hopper.MBARRIER_BYTES
    rings = dict.fromkeys(("kv",) if spec.load.barrier == "shared" else ("k", "v"), spec.load.kv_stages)
    if footprint.converts(spec):
        rings = {**dict.fromkeys(("k8", "v8"), spec.kv.stages), **rings}
    if footprint.transposes(spec):
        rings["vt"] = spec.load.kv_stages
    if footprint.specialized(spec) and not footprint.keys_free_q(spec):
        rings = {"q": spec.load.q_stages, **rings}
    else:
        yield SharedPlace("q_full", None, offset, size)
        offset += size
    if footprint.tells_tiles(spec):
        rings["tile"] = footprint.tile_slots(spec)
    for ring, stages in rings.items():
        for role in ("full", "empty"):
            for stage in range(stages):
                yield SharedPlace(f"{ring}_{role}", stage, offset, size)
                offset += size


def _containing(places: Iterable[SharedPlace], offset: int) -> SharedPlace | None:
    return next((place for place in places if place.offset <= offset < place.offset + place.bytes), None)
