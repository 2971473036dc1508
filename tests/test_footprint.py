"""What specs cost on the chip, against numbers derived by hand."""

from __future__ import annotations

import re

import pytest
from rendering import changed, named, variants

from fa3gen.design.cta import cta_of
from fa3gen.design.footprint import (
    REGISTER_BUDGETS,
    Region,
    barrier_bytes,
    computing_threads,
    converting_budget,
    converts,
    flattened,
    kv_stages,
    launch_registers,
    persistent,
    register_budget,
    registers_per_thread,
    shared_memory_map,
    threads,
    total_bytes,
)
from fa3gen.hardware import hopper
from fa3gen.spec.model import Spec


def spec(stem: str) -> Spec:
    return named(stem).spec


def total(stem: str) -> int:
    return total_bytes(shared_memory_map(spec(stem)), barrier_bytes(spec(stem)))


def test_hardware_limits() -> None:
    assert hopper.SMEM_PER_CTA == 232448
    assert (hopper.REGISTERS_PER_SM, hopper.REGISTERS_PER_THREAD) == (65536, 255)


@pytest.mark.parametrize(
    ("stem", "regions"),
    [
        # Naive: S lies in global memory.
        ("k1_d128", {}),
        # 64 x 128 x 2 = 16384 for Q and for the buffer that K and V share; S: 64 rows of 64 + 8 floats, 18432.
        ("k2_d128", {"sQ": 16384, "sKV": 16384, "sS": 18432}),
        # 64 x 64 x 2 = 8192, twice that for each ring of 2.
        ("k2_cp_async_d64", {"sQ": 8192, "sK": 16384, "sV": 16384, "sS": 18432}),
        # 5 x 16384 = 81920.
        ("k3_3_d128", {"sQ": 16384, "sK": 81920, "sV": 81920, "sS": 18432}),
        ("k4_1_d128", {"sQ": 16384, "sK": 32768, "sV": 32768, "sS": 18432}),
        # Q: 128 x 128 x 2 = 32768; K, V: 2 x 64 x 128 x 2 = 32768; P: 128 x 64 x 2 = 16384.
        ("k4_smem_d128", {"sQ": 32768, "sK": 32768, "sV": 32768, "sP": 16384}),
        # Half as much of Q, K and V; P does not depend on the head dim.
        ("k4_smem_d64", {"sQ": 16384, "sK": 16384, "sV": 16384, "sP": 16384}),
        ("k4_2_d128", {"sQ": 32768, "sK": 32768, "sV": 32768}),
        # Tiles of 128 keys: 2 x 128 x 128 x 2 = 65536.
        ("ping_pong_d128", {"sQ": 32768, "sK": 65536, "sV": 65536}),
        # Q: 192 x 64 x 2 = 24576; K, V: 2 x 128 x 64 x 2 = 32768.
        ("k5_d64", {"sQ": 24576, "sK": 32768, "sV": 32768}),
        # Q: 128 x 192 x 2 = 49152; K: 2 x 128 x 192 x 2 = 98304; V has 128 columns: 2 x 128 x 128 x 2 = 65536.
        ("fwd_d192_128", {"sQ": 49152, "sK": 98304, "sV": 65536}),
        # Two buffers for Q, 2 x 128 x 128 x 2, and one for O; four coordinates of 4 bytes for each of 2 tiles ahead.
        ("fwd_d128_causal", {"sQ": 65536, "sK": 65536, "sV": 65536, "sO": 32768, "tiles": 32}),
        # Where O goes out of the registers, a number of 4 bytes: Q 128 x 256 x 2, K and V 2 x 80 x 256 x 2.
        ("fwd_d256_causal", {"sQ": 65536, "sK": 81920, "sV": 81920, "tiles": 8}),
        # Tiles known from the start need no numbers: Q 2 x 192 x 64 x 2, K and V 2 x 128 x 64 x 2, O half of Q.
        ("fwd_d64", {"sQ": 49152, "sK": 49152, "sV": 49152, "sO": 24576}),
        # O straight from the registers: Q 128 x 256 x 2, K and V 2 x 80 x 256 x 2.
        ("fwd_d256", {"sQ": 65536, "sK": 65536, "sV": 65536}),
        # Packing moves rows about and takes no more of them.
        ("fwd_d128_pack4_causal", {"sQ": 65536, "sK": 65536, "sV": 65536, "sO": 32768, "tiles": 32}),
    ],
)
def test_regions(stem: str, regions: dict[str, int]) -> None:
    found = shared_memory_map(spec(stem))
    assert {region.name: region.bytes for region in found} == regions
    assert [region.name for region in found] == list(regions)  # also in this order


@pytest.mark.parametrize(
    ("stem", "count"),
    [
        ("k1_d64", 0),
        ("k2_d64", 0),
        ("k2_cp_async_d64", 0),
        ("k3_1_d64", 3),  # Q, and a full and an empty one: 1 + 2 x 1
        ("k3_3_d64", 11),  # 1 + 2 x 5
        ("k4_smem_d64", 5),  # one ring: 1 + 2 x 2
        ("k4_2_d64", 9),  # a ring each for K and V: 1 + 2 x 2 x 2
        # In a specialised kernel Q has a ring, too: full and empty for each of its stages.
        ("k5_d64", 10),  # 2 x (1 + 2 + 2)
        ("fwd_d128", 12),  # 2 x (2 + 2 + 2)
        ("fwd_d256", 9),  # 1 + 2 x (2 + 2): the one place of Q is free when its last K is
        ("fwd_d128_causal", 16),  # and a ring of 2 for the numbers of tiles
        ("fwd_d256_causal", 13),
        ("fwd_small_d128", 9),
    ],
)
def test_barriers(stem: str, count: int) -> None:
    assert barrier_bytes(spec(stem)) == 8 * count


@pytest.mark.parametrize(
    ("stem", "size"),
    [
        ("k1_d64", 0),
        # 8192 + 8192 + 18432 = 34816 = 34 x 1024.
        ("k2_d64", 34816),
        # 16384 + 16384 + 18432 = 51200 = 50 x 1024.
        ("k2_d128", 51200),
        # 8192 + 16384 + 16384 + 18432 = 59392 = 58 x 1024.
        ("k2_cp_async_d64", 59392),
        # 8192 + 8192 + 8192 + 18432 = 43008, + 3 x 8 = 43032, up to 43 x 1024.
        ("k3_1_d64", 44032),
        # 16384 + 81920 + 81920 + 18432 = 198656 = 194 x 1024, + 11 x 8 = 198744, up to 195 x 1024.
        ("k3_3_d128", 199680),
        # 16384 + 32768 + 32768 + 18432 = 100352 = 98 x 1024, + 9 x 8, up to 99 x 1024.
        ("k4_1_d128", 101376),
        # 3 x 32768 + 16384 = 114688 = 112 x 1024, + 5 x 8, up to 113 x 1024.
        ("k4_smem_d128", 115712),
        # 3 x 32768 = 98304 = 96 x 1024, + 9 x 8 = 98376, up to 97 x 1024.
        ("k4_2_d128", 99328),
        # 3 x 16384 = 49152 = 48 x 1024, + 9 x 8, up to 49 x 1024.
        ("k4_2_d64", 50176),
        # 3 x 65536 + 32768 = 229376 = 224 x 1024, + 12 x 8, up to 225 x 1024; 8 + 16 x 8 stay within that.
        ("fwd_d128", 230400),
        ("fwd_d128_causal", 230400),
        # 49152 + 98304 + 65536 = 212992 = 208 x 1024, + 10 x 8, up to 209 x 1024.
        ("fwd_d192_128", 214016),
    ],
)
def test_total(stem: str, size: int) -> None:
    assert total(stem) == size


def region(size: int, align: int) -> Region:
    return Region("s", size, "", align, "")


@pytest.mark.parametrize(
    ("regions", "barriers", "size"),
    [
        ([], 0, 0),
        ([region(100, 8)], 0, 104),  # 100, up to a multiple of 8
        ([region(100, 8), region(10, 128)], 8, 256),  # 100, up to 128, + 10 + 8 = 146, up to 2 x 128
        ([region(10, 1024), region(1, 1024)], 0, 2048),  # 10, up to 1024, + 1, up to 2 x 1024
        ([region(1024, 1024)], 0, 1024),  # nothing to round
    ],
)
def test_alignment(regions: list[Region], barriers: int, size: int) -> None:
    assert total_bytes(regions, barriers) == size


def test_threads_and_stages() -> None:
    assert (threads(spec("k2_d64")), kv_stages(spec("k2_d64"))) == (128, 1)
    assert (threads(spec("k4_1_d64")), kv_stages(spec("k4_1_d64"))) == (128, 2)
    assert (threads(spec("k4_2_d64")), kv_stages(spec("k3_3_d64"))) == (256, 5)
    assert (threads(spec("k5_d128")), computing_threads(spec("k5_d128"))) == (384, 256)
    assert (threads(spec("k6_d64")), computing_threads(spec("k6_d64"))) == (512, 384)
    assert threads(spec("k4_2_d64")) == computing_threads(spec("k4_2_d64"))
    assert (threads(spec("fwd_d64")), computing_threads(spec("fwd_d64"))) == (512, 384)


def test_persistent_and_flattened() -> None:
    """With a second buffer for Q the loop over keys runs on from one tile of queries to the next."""
    found = {stem: (persistent(spec(stem)), flattened(spec(stem))) for stem in ("k6_d128", "fwd_d128", "fwd_d256")}
    assert found == {"k6_d128": (False, False), "fwd_d128": (True, True), "fwd_d256": (True, False)}
    one = changed("fwd_d128", load={"engine": "tma", "q_stages": 1, "kv_stages": 2, "barrier": "separate"}).spec
    # One buffer of 32768 bytes less, and three barriers.
    assert (flattened(one), barrier_bytes(one)) == (False, 8 * 9)
    assert total_bytes(shared_memory_map(one), barrier_bytes(one)) == 230400 - 32768


@pytest.mark.parametrize(
    ("warpgroups", "launched"),
    [
        (1, 255),  # 65536 / 256 = 256, but at most 255
        (2, 168),  # 65536 / 384 = 170, in units of 8
        (3, 128),  # 65536 / 512
    ],
)
def test_registers_at_launch(warpgroups: int, launched: int) -> None:
    tile = {"q": 64 * warpgroups, "warpgroups": warpgroups}
    assert launch_registers(changed("k5_d64", tile=tile).spec) == launched
    producer, consumer = REGISTER_BUDGETS[warpgroups]
    assert register_budget(changed("k5_d64", tile=tile).spec) == (producer, consumer)
    assert producer + warpgroups * consumer <= (warpgroups + 1) * launched
    assert all(count % 8 == 0 and 24 <= count <= 256 for count in (producer, consumer))


@pytest.mark.parametrize(
    ("stem", "mask", "dims", "budget"),
    [
        ("fwd_paged_rows_any_window_d128", "window", {}, (40, 232)),
        ("fwd_paged_rows_d128_causal", "causal", {}, (40, 232)),
        ("fwd_paged_rows_d128_causal", "causal", {"head_dim": 192, "head_dim_v": 128}, (56, 224)),
        ("fwd_paged_rows_any_window_d128", "window", {"head_dim": 192}, (56, 224)),
        ("fwd_paged_kv8_rows_d64_causal", "causal", {}, (40, 208)),
        ("fwd_paged_kv8_rows_d64_causal", "window", {}, (56, 200)),
        ("fwd_paged_kv8_rows_d128_causal", "causal", {}, (40, 176)),
        ("fwd_paged_kv8_rows_d128_causal", "window", {}, (56, 168)),
    ],
)
def test_registers_of_a_warp_that_gathers_rows(
    stem: str, mask: str, dims: dict[str, int], budget: tuple[int, int]
) -> None:
    """With 40 it spills, as compiled: of 8 bits by windows, of three spans, or where V has other rows than K."""
    asked = changed(stem, mask={"kind": mask}, problem=dims).spec
    assert register_budget(asked) == budget
    more, each = (asked.kv.warpgroups, converting_budget(asked)[1]) if converts(asked) else (0, 0)
    assert budget[0] + more * each + 2 * budget[1] <= (3 + more) * launch_registers(asked)


def test_registers_where_ctas_share_an_sm() -> None:
    """65536 / (2 x 256) = 128, of which 2 x 128 - 24 go to a consumer; 65536 / (3 x 256) = 85, in units of 8: 80."""
    two = spec("fwd_small_d128")
    assert (launch_registers(two), register_budget(two)) == (128, (24, 232))
    three = changed("fwd_small_d128", tile={"ctas_per_sm": 3}).spec
    assert (launch_registers(three), register_budget(three)) == (80, (24, 136))


@pytest.mark.parametrize(
    ("stem", "held"),
    [
        ("k1_d128", {"other": 24}),
        # O: 128 x 128 / 256 = 64; S: 128 x 64 / 256 = 32; P is half as wide as S: 16.
        ("k4_2_d128", {"O": 64, "S": 32, "P": 16, "other": 24}),
        # Q: 128 x 128 elements of 16 bits, two in a register of 256 threads: 128 / 4.
        ("k4_q_registers_d128", {"O": 64, "Q": 32, "S": 32, "P": 16, "other": 24}),
        # The producer's threads hold none of it: O 128 x 128 / 256 = 64, S 128 x 128 / 256 = 64, P 32.
        ("k5_d128", {"O": 64, "S": 64, "P": 32, "other": 24}),
        ("ping_pong_d128", {"O": 64, "S": 64, "P": 32, "other": 24}),
        # As in ping_pong, for every tile: O 128 x 128 / 256 = 64; of head dims 192/128 O has 128 columns, too.
        ("fwd_d128_causal", {"O": 64, "S": 64, "P": 32, "other": 24}),
        ("fwd_d192_128", {"O": 64, "S": 64, "P": 32, "other": 24}),
        # O: 128 x 256 / 256 = 128; S: 128 x 80 / 256 = 40.
        ("fwd_d256", {"O": 128, "S": 32, "P": 16, "other": 24}),
        # Three consumer warpgroups: O 192 x 64 / 384 = 32, S 192 x 128 / 384 = 64; P takes the place of S, 64 / 8.
        ("k5_d64", {"O": 32, "S": 64, "P beside S": 8, "other": 24}),
        # O: 128 x 64 / 256 = 32.
        ("k4_smem_d64", {"O": 32, "S": 32, "P": 16, "other": 24}),
        # O: 64 x 128 / 128 = 64; 64 x 16 / 128 = 8 rows with two numbers each; S: 64 x 64 / 128 = 32, and a step of PV
        # holds 64/16 rows of 128/16 columns of V, 32.
        ("k4_1_d128", {"O": 64, "row maxima and sums": 16, "S or one step of P V": 32, "other": 24}),
        # S: 64 x 64 / 128 = 32; K: 64/16 = 4 rows of 8 elements = 32, V: 4 rows of 128/16 = 8 elements = 32.
        (
            "k2_d128",
            {"O": 64, "row maxima and sums": 16, "S": 32, "one step of K or V": 32, "one step of Q or P": 8}
            | {"other": 24},
        ),
        # The same, and 64 x 64 / 8 / 128 = 4 copies of 16 bytes for each thread, 3 registers of addresses each.
        (
            "k2_cp_async_d64",
            {"O": 32, "row maxima and sums": 16, "S": 32, "one step of K or V": 32, "one step of Q or P": 8}
            | {"addresses of copies": 12, "other": 24},
        ),
    ],
)
def test_registers(stem: str, held: dict[str, int]) -> None:
    assert dict(registers_per_thread(spec(stem))) == held


def test_registers_of_a_scalar_kernel_fall_with_threads() -> None:
    # 256 threads: O 64 x 64 / 256 = 16, S 16; 64 x 16 / 256 = 4 rows; a step holds as much as before.
    spec = changed("k2_d64", tile={"threads": 256}).spec
    assert dict(registers_per_thread(spec)) == {
        "O": 16,
        "row maxima and sums": 8,
        "S": 16,
        "one step of K or V": 32,
        "one step of Q or P": 8,
        "other": 24,
    }


@pytest.mark.parametrize("stem", sorted(variants()))
def test_formulas_are_the_bytes(stem: str) -> None:
    """`2 stages x 128 x 128 x 2` in the header is the arithmetic behind the number before it."""
    for item in cta_of(variants()[stem].spec).regions:
        product = 1
        for factor in re.sub(r" (stages|warps)", "", item.formula).split(" x "):
            product *= int(factor)
        assert product == item.bytes, item
