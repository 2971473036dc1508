"""Rooflines, waves and occupancy, against numbers derived by hand."""

from __future__ import annotations

import pytest
from rendering import named

from fa3gen.base.errors import UserError
from fa3gen.design import ceiling, tile_order
from fa3gen.design.family import Shape
from fa3gen.design.work import Problem
from fa3gen.hardware import chips
from fa3gen.hardware.chips import H100, H200
from fa3gen.spec.model import Spec


def spec(stem: str) -> Spec:
    return named(stem).spec


def cycles(stem: str) -> dict[str, float]:
    return {bound.unit: bound.cycles for bound in ceiling.steady(spec(stem), H200).bounds}


def with_tile_rows(stem: str, q: int) -> Spec:
    base = spec(stem)
    return base.model_copy(update={"tile": base.tile.model_copy(update={"q": q, "warpgroups": q // 64})})


def test_the_peak_is_that_of_the_data_sheets() -> None:
    assert H100.tensor_tflops(2) == H200.tensor_tflops(2) == pytest.approx(989.4, abs=0.1)
    assert H200.tensor_tflops(1) == 2 * H200.tensor_tflops(2)
    assert (H100.hbm.value, H200.hbm.value) == (3.35e12, 4.8e12)
    assert all(rate.source for rate in (H100.clock_hz, H100.tensor, H100.exp2, H100.smem, H100.l2, H100.hbm))


def test_chips_by_name() -> None:
    assert chips.select(None) == [H100, H200]
    assert chips.select(["H200", "h200"]) == [H200]
    with pytest.raises(UserError, match="b200: there are figures for h100 and h200"):
        chips.select(["b200"])


def test_a_step_of_128_x_128_at_head_dim_128() -> None:
    found = cycles("ping_pong_d128")
    # 8388608 FLOP / 4096; 16896 ex2 / 16; 229376 bytes / 128; 65536 bytes over 5120 / 132 a cycle.
    assert found["tensor cores"] == 2048
    assert found["exponentials"] == 1056
    assert found["shared memory"] == 1792
    assert found["L2"] == pytest.approx(65536 * 132 / 5120)
    assert "FP32 multiply-adds" not in found


@pytest.mark.parametrize(
    ("stem", "unit"),
    [
        ("k6_d128", "tensor cores"),
        # 192 x 128: 1536 cycles of the tensor cores, 24 x 66 x ... = 1584 of exponentials.
        ("k6_d64", "exponentials"),
        # 64 rows of queries read twice as much from L2 for each FLOP.
        ("fwd_d128_short", "L2"),
        ("k4_smem_d64", "shared memory"),
        ("k2_d64", "instruction issue"),
        ("k1_d64", "L1"),
    ],
)
def test_what_bounds_a_kernel(stem: str, unit: str) -> None:
    assert ceiling.steady(spec(stem), H100).binding.unit == unit


def test_the_ceiling_is_the_peak_where_the_tensor_cores_bound() -> None:
    assert ceiling.steady(spec("ping_pong_d128"), H200).tflops == pytest.approx(H200.tensor_tflops(2))
    # Exponentials take 1584 of 1536 cycles.
    assert ceiling.steady(spec("ping_pong_d64"), H200).tflops == pytest.approx(H200.tensor_tflops(2) * 1536 / 1584)


@pytest.mark.parametrize(
    ("stem", "rows", "length", "percent"),
    [
        # Tiles over 132 SMs, rounded up, times the rows of queries that are no padding.
        ("k6_d64", 64, 512, 99),
        ("k6_d64", 128, 512, 97),
        ("k6_d64", 192, 512, 86),
        ("k6_d64", 192, 4096, 94),
        ("k6_d64", 192, 16384, 99),
        ("k6_d64", 256, 512, 97),
        ("k6_d128", 64, 512, 97),
        ("k6_d128", 128, 512, 97),
        ("k6_d128", 128, 16384, 97),
        ("k6_d128", 192, 512, 86),
        ("k6_d128", 192, 16384, 94),
        # The last wave in equal shares: all but even, and padding is left.
        ("fwd_d256", 128, 16384, 100),
        ("fwd_d256", 192, 16384, 99),
    ],
)
def test_waves(stem: str, rows: int, length: int, percent: int) -> None:
    module = with_tile_rows(stem, rows)
    heads = 2048 // module.problem.head_dim
    problem = Problem(module, Shape(16384 // length, length, length, heads, heads))
    found = ceiling.of_problem(problem, H200, ceiling.occupancy(module))
    padding = length / (-(-length // rows) * rows)
    assert found.balance * padding * 100 == pytest.approx(percent, abs=0.6)


def test_a_problem_is_bound_by_the_steady_state_and_its_waves() -> None:
    problem = Problem(spec("ping_pong_d128"), Shape(1, 16384, 16384, 16, 16))
    found = ceiling.of_problem(problem, H200, ceiling.occupancy(spec("ping_pong_d128")))
    # 2048 tiles on 132 SMs: 15.5 waves, of which 16 have to be waited for.
    assert found.waves == pytest.approx(2048 / 132)
    assert found.tflops == pytest.approx(H200.tensor_tflops(2) * 2048 / 132 / 16)
    assert found.bounded_by == "tensor cores"


def test_share_of_the_last_wave() -> None:
    assert tile_order.tail_share(1, 40, 5) == 8  # 40 steps for five CTAs
    assert tile_order.tail_share(1, 40, 132) == 5  # at most 8 parts of a tile
    assert tile_order.tail_share(2, 12, 3) == 8  # saves just enough
    assert tile_order.tail_share(3, 12, 4) == 12  # 9 would save too little: whole tiles
    # 2048 tiles of 128 steps: 15 waves, then 68 tiles for 132 SMs, 65.9 steps each.
    problem = Problem(spec("fwd_d128"), Shape(1, 16384, 16384, 16, 16))
    assert ceiling.busiest_sm(spec("fwd_d128"), problem, 132) == 15 * 128 + 66
    assert ceiling.busiest_sm(spec("fwd_d128_static"), problem, 132) == 16 * 128


def test_a_short_causal_problem_is_bound_by_memory() -> None:
    module = spec("fwd_d128_causal")
    problem = Problem(module, Shape(32, 512, 512, 16, 16))
    on_h100, on_h200 = (ceiling.of_problem(problem, chip, ceiling.occupancy(module)) for chip in (H100, H200))
    assert on_h100.bounded_by == on_h200.bounded_by == "HBM"
    assert on_h100.tflops == pytest.approx(problem.flops / (problem.hbm_bytes / 3.35e12) / 1e12)
    assert on_h200.tflops / on_h100.tflops == pytest.approx(4.8 / 3.35)


def test_longest_first_balances_better_than_head_by_head() -> None:
    shape = Shape(1, 4096, 4096, 16, 16)
    drawn = ceiling.busiest_sm(spec("fwd_d128_causal"), Problem(spec("fwd_d128_causal"), shape), 132)
    by_head = ceiling.busiest_sm(spec("ping_pong_d128_causal"), Problem(spec("ping_pong_d128_causal"), shape), 132)
    ideal = Problem(spec("ping_pong_d128_causal"), shape).visited / 132
    assert ideal <= drawn < by_head


def test_more_sms_than_tiles() -> None:
    problem = Problem(spec("fwd_d128_causal"), Shape(1, 256, 256, 1, 1))
    assert ceiling.busiest_sm(spec("fwd_d128_causal"), problem, 132) == 2


@pytest.mark.parametrize(
    ("stem", "registers", "ctas", "limits"),
    [
        # 256 threads x 128 registers are half of the register file; 2 x (99328 + 1024) of 233472 bytes.
        ("k4_2_d128", 127, 2, ("registers", "shared memory")),
        # 168 registers x 128 threads: 3; (101376 + 1024) bytes: 2.
        ("k3_2_d128", 168, 2, ("shared memory",)),
        ("k3_3_d128", 168, 1, ("shared memory",)),
        # 384 threads x 168 registers.
        ("k6_d128", 168, 1, ("registers", "shared memory")),
        # 512 threads x 128 registers are the whole register file, whatever shared memory is left.
        ("k6_d64", 128, 1, ("registers",)),
    ],
)
def test_occupancy(stem: str, registers: int, ctas: int, limits: tuple[str, ...]) -> None:
    found = ceiling.occupancy(spec(stem), registers)
    assert (found.ctas, found.limited_by, found.registers_known) == (ctas, limits, True)


def test_each_place_takes_the_next_tile_when_it_is_through() -> None:
    assert ceiling.dealt([3, 1, 1, 2, 4], 2) == [[3, 4], [1, 1, 2]]
    assert ceiling.dealt([3, 1], 5) == [[3], [1]]
    assert ceiling.dealt([1, 2, 3], 2, lambda tile: 10 - tile) == [[1], [2, 3]]


def test_a_kernel_of_packed_sequences_may_have_two_ctas_for_each_sm() -> None:
    found = ceiling.occupancy(spec("fwd_packed_short_d64_causal"))
    assert found.ctas == 2 and "launch: 2 per SM" in found.limited_by


def test_a_persistent_kernel_has_one_cta_for_each_sm() -> None:
    found = ceiling.occupancy(spec("fwd_d64_short"), 128)
    assert found.ctas == 1
    assert found.limited_by == ("launch: 1 per SM",)


def test_parts_of_the_keys_fill_the_gpu() -> None:
    """One query on 4096 keys: 64 tiles of 64. 8 tiles of queries have 16 parts of 4 steps each, on 128 of 132 SMs."""
    decode = spec("fwd_decode_d128")
    for batch, heads, parts, steps in ((1, (32, 8), 16, 4), (32, (32, 8), 1, 2 * 64), (1, (8, 1), 32, 2)):
        problem = Problem(decode, Shape(batch, 1, 4096, *heads))
        assert problem.tiles == batch * heads[1]
        assert ceiling.ctas_of(problem, 132) == problem.tiles * parts
        assert ceiling.busiest_sm(decode, problem, 132) == steps
