"""The pipeline simulator: tiny cases with timelines derived by hand, properties, every module, and the command."""

from __future__ import annotations

import json
import math
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Literal

import jsonschema
import pytest
from rendering import CHECKOUT, ROOT, attention_stems, changed, named

from fa3gen import cli
from fa3gen.base.errors import UserError
from fa3gen.compile.one_bank import NO_CONFLICTS, OneBank
from fa3gen.design import ceiling, work
from fa3gen.design.family import PackedShape, Shape
from fa3gen.design.work import Problem
from fa3gen.hardware import chips
from fa3gen.inspect import simulation
from fa3gen.inspect.simulation import Settings, Simulation, Times, comparison
from fa3gen.inspect.simulation.document import SCHEMA
from fa3gen.inspect.simulation.engine import Actor, Compute, Engine, Wait
from fa3gen.inspect.simulation.lanes import lanes
from fa3gen.inspect.simulation.picture import TICKS, tick_step
from fa3gen.inspect.simulation.run import with_stages
from fa3gen.inspect.simulation.times import UNITS, Piece
from fa3gen.records import packed_records
from fa3gen.spec.model import Spec
from fa3gen.spec.specfile import attention_only

STEMS = [stem for stem in attention_stems() if not stem.startswith("k1_")]
# Loads transfer a byte a cycle: K and V take 100 each, Q nothing; each lands 300 after it began.
TINY = Times(
    qk=Piece("S = Q K^T", tensor=100.0),
    pv=Piece("O += P V", tensor=100.0),
    softmax=(Piece("softmax", 50.0),),
    rescale=Piece("rescale"),
    epilogue=Piece("epilogue"),
    load_latency=300.0,
    landing_rate=math.inf,
    load_rate=1.0,
    smem_rate=math.inf,
    q_bytes=0,
    k_bytes=100,
    v_bytes=100,
    copy_q=None,
    copy_k=None,
    copy_v=None,
)


def spec(stem: str) -> Spec:
    return named(stem).spec


def one_warpgroup(stem: str, **parts: object) -> Spec:
    return changed(stem, tile={"q": 64, "warpgroups": 1}, **parts).spec


def run(module: Spec, times: Times, *, stages: int = 1, ctas: int = 1, tiles: int = 4, queries: int = 1) -> Simulation:
    return simulation.simulate(with_stages(module, stages), times, Settings(stages, ctas, (tiles,) * queries))


def spans(found: Simulation, kind: str, what: str) -> list[tuple[float, float]]:
    return [(span.start, span.end) for span in found.spans if span.kind == kind and span.what == what]


# -- by hand


def test_one_stage_loads_multiplies_and_takes_the_softmax_in_sequence() -> None:
    """K is transferred from 0 to 100 and lands at 300, V from 100 on and lands at 400. S to 400, softmax to 450, P V to
    550; only then is the next K requested: everything comes again 550 later."""
    found = run(one_warpgroup("k4_2_d64"), TINY, tiles=2)
    assert spans(found, "load", "K") == [(0, 300), (550, 850)]
    assert spans(found, "load", "V") == [(0, 400), (550, 950)]
    assert spans(found, "product", "S = Q K^T") == [(300, 400), (850, 950)]
    assert spans(found, "compute", "softmax") == [(400, 450), (950, 1000)]
    assert spans(found, "product", "O += P V") == [(450, 550), (1000, 1100)]
    assert spans(found, "wait", "K to land") == [(550, 850)]  # Q lands at 300, too
    assert spans(found, "held", "K") == [(300, 400), (850, 950)]
    assert spans(found, "held", "V") == [(400, 550), (950, 1100)]
    assert found.end == 1100
    assert found.utilisation("tensor cores") == pytest.approx(400 / 1100)


def test_one_barrier_for_both_waits_for_v_before_the_first_product() -> None:
    found = run(one_warpgroup("k4_smem_d64"), TINY, tiles=2)
    # V lands at 400; K's stage is given back with V's, at 650.
    assert spans(found, "product", "S = Q K^T") == [(400, 500), (1050, 1150)]
    assert spans(found, "held", "K") == [(300, 650), (950, 1300)]


def test_two_stages_hide_a_load_that_is_shorter_than_a_step() -> None:
    """A step takes 250. With a latency of 200 the K requested at its end lands 200 later, in time for the one after."""
    found = run(one_warpgroup("k4_2_d64"), replace(TINY, load_latency=200.0), stages=2, tiles=8)
    starts = [start for start, _ in spans(found, "product", "S = Q K^T")]
    assert starts == [200 + 250 * tile for tile in range(8)]
    assert found.step_cycles == 250
    assert found.steady("tensor cores") == pytest.approx(200 / 250)


def test_two_stages_hide_a_part_of_a_longer_load() -> None:
    """A K requested at the end of a step lands 300 later; the step between takes 250, so that 50 are waited for in
    every other step."""
    found = run(one_warpgroup("k4_2_d64"), TINY, stages=2, tiles=10)
    starts = [start for start, _ in spans(found, "product", "S = Q K^T")]
    assert starts[:6] == [300, 550, 850, 1100, 1400, 1650]


def test_overlap_takes_the_softmax_beside_p_v() -> None:
    """With loads for nothing: S to 100, softmax to 150, rescaled to 160. Then S to 260 and P V of the tile before to
    360 beside the softmax, rescaled to 370: a period of 210 instead of 260."""
    quick = replace(TINY, load_latency=0.0, k_bytes=0, v_bytes=0, rescale=Piece("rescale", 10.0))
    overlapped = one_warpgroup("k5_d128")
    found = run(overlapped, quick, stages=2, tiles=4)
    assert spans(found, "product", "S = Q K^T") == [(0, 100), (160, 260), (370, 470), (580, 680)]
    assert spans(found, "product", "O += P V") == [(260, 360), (470, 570), (680, 780), (790, 890)]
    assert spans(found, "compute", "softmax") == [(100, 150), (260, 310), (470, 520), (680, 730)]
    sequential = one_warpgroup("k5_d128", schedule={"kind": "warp_specialized", "overlap": False})
    assert run(sequential, quick, stages=2, tiles=4).end == 4 * 260


def test_two_consumers_share_the_tensor_cores() -> None:
    """Evenly: both S take 200 together, both softmaxes 100. Oldest first: the second S waits for the first."""
    quick = replace(TINY, load_latency=0.0, k_bytes=0, v_bytes=0)
    module = changed("k5_d128", schedule={"kind": "warp_specialized", "overlap": False}).spec
    even = simulation.simulate(module, quick, Settings(2, 1, (1,), "even"))
    assert spans(even, "product", "S = Q K^T") == [(0, 200), (0, 200)]
    # Softmaxes of 50 issue cycles each, together 100; then P V.
    assert spans(even, "product", "O += P V") == [(300, 500), (300, 500)]
    oldest = simulation.simulate(module, quick, Settings(2, 1, (1,), "oldest"))
    assert spans(oldest, "product", "S = Q K^T") == [(0, 100), (100, 200)]
    assert spans(oldest, "product", "O += P V") == [(200, 300), (300, 400)]


def test_turns_keep_consumers_apart_where_products_are_served_evenly() -> None:
    times = simulation.times_of(spec("k6_d128"), chips.H200)
    together, apart = (
        simulation.simulate(spec(stem), times, Settings(3, 1, (16,), "even")) for stem in ("k5_d128", "k6_d128")
    )
    assert apart.steady("tensor cores") > 1.1 * together.steady("tensor cores")
    assert "its turn" in {stall.what for stall in apart.stalls()}
    assert "its turn" not in {stall.what for stall in together.stalls()}


def test_flattened_tiles_of_queries_run_on() -> None:
    """With one buffer of Q: S to 100, softmax to 150; S and P V of the tile before to 350 and once more to 550, the
    last P V to 650, epilogue to 730, four times. With two the next S runs from 650 to 750, beside the epilogue: from
    the end of one first S to the next are 650, and 630 to the end."""
    quick = replace(TINY, load_latency=0.0, k_bytes=0, v_bytes=0, epilogue=Piece("epilogue", 80.0))
    single = changed("fwd_d128_short", load={"q_stages": 1}).spec
    assert run(single, quick, stages=2, tiles=3, queries=4).end == 4 * 730
    assert run(spec("fwd_d128_short"), quick, stages=2, tiles=3, queries=4).end == 100 + 3 * 650 + 630
    # A tile of keys less or more is a step of 200 less or more.
    assert simulation.simulate(single, quick, Settings(2, 1, (3, 1, 2))).end == 730 + 330 + 530


# -- the engine


def test_pieces_share_what_is_scarce() -> None:
    """Two pieces that each need 100 cycles of issue in 100: both end at 200. One of exponentials beside them is not
    slowed down, unless it needs issue slots, too."""
    engine = Engine()
    for number, piece in enumerate((Piece("a", 100.0), Piece("b", 100.0), Piece("c", exp=50.0))):
        engine.start(Actor(f"{number}", 0), iter([Compute(piece)]))  # type: ignore[arg-type]
    assert engine.run() == 200
    assert {span.what: span.end for span in engine.spans} == {"a": 200, "b": 200, "c": 50}
    assert engine.busy["issue"] == pytest.approx(200)
    assert engine.busy["exponentials"] == pytest.approx(50)


def test_warps_that_wait_for_themselves_leave_issue_slots_empty() -> None:
    """Each of two warps could issue in half of the cycles and takes 100. In a quarter of them neither can: 75 of 100
    slots are used, and both together take 100 / 0.75. With a third one 87.5 are, of 150."""
    for count, end in ((1, 100.0), (2, 100 / 0.75), (3, 150 / 0.875)):
        engine = Engine()
        for number in range(count):
            engine.start(Actor(f"{number}", 0), iter([Compute(Piece("a", 50.0, chain=100.0))]))  # type: ignore[arg-type]
        assert engine.run() == pytest.approx(end)
        assert engine.busy["issue"] == pytest.approx(50 * count)


def test_a_transfer_is_part_of_its_flight() -> None:
    """Tiles on their way for 30 of which each holds the way in for 10; one that holds it for 50 lands when through."""
    engine = Engine()
    for number, transfer in enumerate((10.0, 10.0, 50.0)):
        engine.load(Actor("a", 0), f"{number}", {"loads": transfer}, 0, number, flight=30.0, full=number)
    engine.run()
    assert [(span.start, span.end) for span in engine.spans] == [(0, 30), (0, 40), (0, 70)]


def test_loads_of_two_producers_take_turns() -> None:
    engine = Engine()
    for name in ("a", "b"):
        for number in range(2):
            signal = (name, number)
            engine.load(Actor(name, 0), f"{name}{number}", {"loads": 10.0}, 0, number, flight=20.0, full=signal)
    engine.run()
    assert {span.what: span.end for span in engine.spans} == {"a0": 20, "b0": 30, "a1": 40, "b1": 50}


def test_a_product_a_store_and_a_load_share_shared_memory() -> None:
    """The product reads 100 cycles' worth of its operands in 100, the store and the load write 50 and 30: together they
    need 2.6 times what there is, and then the product is alone. A piece of issue slots goes on as if they were not."""
    engine = Engine()
    product = Piece("S", tensor=64.0, smem=100.0)
    engine.product(Actor("a", 0), product, 0, issued="issued", done="done")
    for name, piece in (("b", Piece("store P", smem=50.0)), ("c", Piece("maxima", issue=40.0))):
        engine.start(Actor(name, 0), iter([Compute(piece)]))  # type: ignore[arg-type]
    engine.load(Actor("d", 0), "K", {"loads": 50.0, "shared memory": 30.0}, 0, 0, flight=140.0, full="full")
    engine.run()
    ends = {span.what: span.end for span in engine.spans}
    # Each at 1 / 2.6: the store and the load, alone 50 each, end at 130 with 50 of the product left, which ends at 180.
    assert ends == pytest.approx({"maxima": 40, "store P": 130, "K": 140, "S": 180})
    assert engine.busy["shared memory"] == pytest.approx(180)
    assert engine.busy["tensor cores"] == pytest.approx(64)


def test_a_wait_for_nothing_is_found() -> None:
    engine = Engine()
    engine.start(Actor("a", 0), iter([Wait("never", "it")]))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="never"):
        engine.run()


# -- every module


@pytest.mark.parametrize("stem", STEMS)
def test_every_module_keeps_to_its_rings_and_its_work(stem: str) -> None:
    module = spec(stem)
    times = simulation.times_of(module, chips.H200)
    settings = replace(simulation.settings_of(module, tiles=5), tiles=(5, 5))
    found = simulation.simulate(module, times, settings)
    steps = settings.ctas * found.groups * 5 * 2
    # Work is done once: products of every step, and nothing else, occupy the tensor cores.
    assert dict(found.busy)["tensor cores"] == pytest.approx(steps * (times.qk.tensor + times.pv.tensor))
    loaded = settings.ctas * 2 * (times.q_bytes + 5 * (times.k_bytes + times.v_bytes))
    assert dict(found.busy)["loads"] == pytest.approx(loaded / times.load_rate)
    # All that explain counts of shared memory, and Q.
    through_smem = settings.ctas * 2 * (times.q_bytes + 5 * work.step(module).smem_bytes)
    assert dict(found.busy)["shared memory"] == pytest.approx(through_smem / times.smem_rate)
    for unit in UNITS:
        assert 0 <= found.utilisation(unit) <= 1 + 1e-9
    assert max(span.end for span in found.spans) <= found.end
    for lane in lanes(found):
        if "stage" in lane.label or lane.label in ("Q", "K", "V"):
            # A stage holds one tile at a time: nothing lands in it before it has been given back. cp.async and TMA in
            # flight count from their request.
            occupied = sorted((span.start, span.end) for span in lane.spans if span.kind == "held")
            assert len(occupied) == len([span for span in lane.spans if span.kind == "load"])
            requests = sorted(span.start for span in lane.spans if span.kind == "load")
            for (_, end), request in zip(occupied, requests[1:], strict=False):
                assert request >= end - 1e-6, lane.label


@pytest.mark.parametrize("arbitration", ["oldest", "even"])
@pytest.mark.parametrize("stem", STEMS)
def test_no_step_is_quicker_than_its_ceiling(stem: str, arbitration: Literal["oldest", "even"]) -> None:
    """What `fa3gen explain` calls a bound is one here, too: for one step, and for all of them from start to end."""
    module = spec(stem)
    settings = simulation.settings_of(module, registers=64, arbitration=arbitration)
    found = simulation.simulate(module, simulation.times_of(module, chips.H200), settings)
    steps = settings.ctas * sum(settings.tiles)
    for bound in ceiling.steady(module, chips.H200).bounds:
        assert found.step_cycles >= bound.cycles * (1 - 1e-9), bound
        assert found.end >= steps * bound.cycles, bound


def test_shared_memory_bounds_k4_smem() -> None:
    """P goes through shared memory, and a product of 64 columns reads all of the 128 bytes a cycle that there are."""
    module = spec("k4_smem_d128")
    times = simulation.times_of(module, chips.H200)
    found = simulation.simulate(module, times, simulation.settings_of(module, tiles=24, registers=127))
    # K and V arriving 32768; Q K^T 2 x 8 x 4096, P written 16384, P V 2 x 4 x 6144: 163840 bytes.
    assert dict(found.step_demand)["shared memory"] == 163840 / 128
    assert found.steady("shared memory") > 0.95 > 0.85 > found.steady("tensor cores")


@pytest.mark.parametrize("stem", ["k2_cp_async_d64", "k3_1_d128", "k4_smem_d64", "k5_d128", "k6_d64", "fwd_d128"])
def test_more_stages_are_never_slower(stem: str) -> None:
    times = simulation.times_of(spec(stem), chips.H200)
    rows = simulation.sweep(spec(stem), times, range(1, 5), tiles=16, ctas=1)
    for fewer, more in zip(rows, rows[1:], strict=False):
        assert more.step_cycles <= fewer.step_cycles * 1.01
    assert rows[0].waiting > rows[-1].waiting


def test_longer_loads_need_more_stages() -> None:
    times = simulation.times_of(spec("k6_d128"), chips.H200)
    for latency, needed in ((0.0, 2), (3000.0, 3), (5000.0, 4)):
        rows = simulation.sweep(spec("k6_d128"), times.overridden(load_latency=latency), range(1, 7), tiles=16)
        enough = next(row.stages for row in rows if row.step_cycles <= rows[-1].step_cycles * 1.05)
        assert enough >= needed


def test_stages_that_cost_a_cta() -> None:
    times = simulation.times_of(spec("k4_2_d128"), chips.H200)
    rows = simulation.sweep(spec("k4_2_d128"), times, [2, 3], tiles=8, registers=127)
    assert [(row.stages, row.ctas, row.legal) for row in rows] == [(2, 2, True), (3, 1, True)]
    assert rows[1].tensor < rows[0].tensor


def test_a_kernel_without_a_ring_has_one_row() -> None:
    times = simulation.times_of(spec("k2_d64"), chips.H200)
    assert [row.stages for row in simulation.sweep(spec("k2_d64"), times, range(1, 7), tiles=4)] == [1]


# -- times


def test_times_of_ping_pong() -> None:
    times = simulation.times_of(spec("ping_pong_d128"), chips.H200)
    # 64 x 128 x 128 x 2 FLOP / 4096.
    assert (times.qk.tensor, times.pv.tensor) == (512, 512)
    # Of a group: 8 instructions with a tile of A in shared memory, 64 x 16 x 2 + 128 x 16 x 2 bytes; 8 without.
    assert (times.qk.smem, times.pv.smem) == (8 * 6144 / 128, 8 * 4096 / 128)
    # 128 threads x 66 exponentials / 16 a cycle.
    assert times.softmax[1].exp == 528
    assert (times.k_bytes, times.v_bytes, times.q_bytes) == (32768, 32768, 32768)
    assert times.load_rate == pytest.approx(5120 / 132)
    # One of 16 KB has landed 723 cycles after its request, as tests/gpu/load_probe.py measured.
    assert times.flight(16384) == pytest.approx(723, abs=1)
    # A lone warp needs 2.4 cycles for an instruction: of the exponentials, 3 for each of 64 scores of a thread.
    assert times.softmax[1].chain == pytest.approx(2.4 * 3 * 64)


def test_reading_operands_can_take_longer_than_multiplying() -> None:
    # N = 64 from shared memory: (64 + 64) x 16 x 2 = 4096 bytes in 32 cycles are the 128 bytes a cycle that there are.
    # With 32 keys (64 + 32) x 16 x 2 = 3072 bytes take 24 cycles, the tensor cores 16.
    narrow = changed("k4_2_d64", tile={"kv": 32}).spec
    qk = simulation.times_of(narrow, chips.H200).qk
    assert (qk.tensor, qk.smem, qk.alone) == (4 * 16, 4 * 24, 4 * 24)


def test_overrides() -> None:
    times = simulation.times_of(spec("k6_d128"), chips.H200)
    changed_times = times.overridden(load_latency=1.0, load_rate=2.0, product_time=300.0, softmax_time=1000.0)
    assert (changed_times.load_latency, changed_times.load_rate) == (1, 2)
    assert changed_times.products_alone == (300, 300)
    assert changed_times.softmax_alone == pytest.approx(1000)
    ratio = changed_times.softmax[1].exp / times.softmax[1].exp
    assert changed_times.rescale.issue / times.rescale.issue == pytest.approx(ratio)
    assert times.overridden() == times
    scalar = simulation.times_of(spec("k2_d64"), chips.H200).overridden(product_time=300.0)
    assert scalar.products_alone == pytest.approx((300, 300)) and scalar.qk.tensor == 0


@pytest.mark.parametrize("threads", [64, 256])
def test_scalar_kernels_of_other_sizes(threads: int) -> None:
    """The same products and exponentials; only the rows of a thread change."""
    usual, other = (
        simulation.times_of(module, chips.H200)
        for module in (spec("k2_d64"), changed("k2_d64", tile={"threads": threads}).spec)
    )
    groups = max(1, threads // 128)
    # Fewer rows of a thread share each row of K that it loads.
    assert (other.qk.issue * groups > usual.qk.issue) == (threads > 128)
    # A factor for each of 64 rows in 16 threads, whoever they are.
    assert other.softmax[0].exp * groups == usual.softmax[0].exp == 64 * (64 + 16) / 16


def test_a_lone_warp_takes_longer_than_its_instructions() -> None:
    """128 threads have 32 scores each, of 64 multiply-adds that wait for one another for 4 cycles; with twice the
    threads half of that, but two warps on each scheduler."""
    times = simulation.times_of(spec("k3_1_d64"), chips.H200)
    assert times.qk.chain == 32 * 64 * 4 == times.qk.alone > 2 * times.qk.issue
    assert times.pv.issue < times.pv.alone == times.pv.issue + 16 * 65  # V and P are awaited for four keys at a time
    assert times.softmax[0].alone == pytest.approx(2.4 * times.softmax[0].issue)
    wider = simulation.times_of(changed("k3_1_d64", tile={"threads": 256}).spec, chips.H200)
    assert wider.qk.chain == times.qk.chain / 2
    narrow = simulation.times_of(changed("k2_d64", tile={"threads": 64}).spec, chips.H200)
    assert narrow.epilogue.chain == 2 * narrow.epilogue.issue  # two warps leave two schedulers idle


def test_operands_of_one_bank_take_issue_slots() -> None:
    """A cycle each of the scheduler. A lone warp of Q K^T waits anyway behind most of its multiply-adds."""
    module = spec("k3_1_d64")
    free, held = (simulation.times_of(module, chips.H200, conflicts) for conflicts in (NO_CONFLICTS, OneBank(712, 96)))
    assert (held.qk.issue - free.qk.issue, held.pv.issue - free.pv.issue) == (712, 96)
    assert 0 < held.qk.chain - free.qk.chain < 712 / 2
    assert held.pv.chain - free.pv.chain == 96
    assert replace(held, qk=free.qk, pv=free.pv) == free


def test_a_lone_cta_hides_conflicts_that_three_do_not() -> None:
    """Cycles of an SM's step for each of 2048 conflicts. Measured on an H200, with cubins of k3_2_d64 whose registers
    were patched: 0.34 with one CTA, 0.90 with two, 0.98 with three."""
    module = spec("k3_2_d64")
    problem, flops = Problem(module, Shape(4, 4096, 4096, 32, 32)), 4 * 64**3

    def cycles(ctas: int, conflicts: OneBank) -> float:
        times = simulation.times_of(module, chips.H200, conflicts)
        tflops = simulation.predict(problem, times, chips.H200, arbitration="oldest", ctas=ctas)
        return flops * chips.H200.sms * chips.H200.clock_hz.value / (tflops * 1e12)

    one, two, three = ((cycles(ctas, OneBank(qk=2048)) - cycles(ctas, NO_CONFLICTS)) / 2048 for ctas in (1, 2, 3))
    assert 0.24 < one < 0.5 < 0.7 < two < three < 1.0


def test_ctas_fill_the_issue_slots_that_one_leaves_empty() -> None:
    """A CTA of four warps has one on each scheduler. Measured on an H200 (generated/evidence/sweep/stages.json): k3 of
    128 threads and two stages gains 36 % and 45 % from a second CTA at head dims 64 and 128, and 8 % from a third."""
    for stem, least in (("k3_2_d64", 1.3), ("k3_2_d128", 1.3)):
        times = simulation.times_of(spec(stem), chips.H200)
        one, two, three = (
            simulation.simulate(spec(stem), times, simulation.settings_of(spec(stem), ctas=ctas)) for ctas in (1, 2, 3)
        )
        assert one.step_cycles > least * two.step_cycles
        assert 1.05 * three.step_cycles < two.step_cycles < 1.2 * three.step_cycles
        assert one.steady("issue") < 0.6


def test_k1_has_no_pipeline() -> None:
    with pytest.raises(UserError, match="no pipeline"):
        simulation.times_of(spec("k1_d64"), chips.H200)


# -- predictions


def test_a_prediction_takes_waves_into_account() -> None:
    times = simulation.times_of(spec("k6_d128"), chips.H200)
    full, one_more = (
        simulation.predict(Problem(spec("k6_d128"), Shape(1, 128 * tiles, 2048, 1, 1)), times, chips.H200)
        for tiles in (132, 133)
    )
    # The 133rd tile takes a wave of its own: nearly as long again for less than a hundredth of work.
    assert one_more < 0.6 * full


def test_a_prediction_is_told_how_many_ctas_share_an_sm() -> None:
    module = spec("k3_3_d128")
    problem, times = Problem(module, Shape(4, 4096, 4096, 16, 16)), simulation.times_of(module, chips.H200)
    one, two = (simulation.predict(problem, times, chips.H200, ctas=ctas) for ctas in (1, 2))
    assert simulation.predict(problem, times, chips.H200) == one < 0.8 * two


def test_tiles_of_packed_sequences_are_dealt_out_in_their_order() -> None:
    """Each place takes the next tile when it is through; its first tile takes longer than one behind another."""
    module = spec("fwd_packed_d128")
    times, chip = simulation.times_of(module, chips.H200), replace(chips.H200, sms=2)
    # Tiles of 128 queries and 128 keys: two of 6 tiles of keys, none, one of 1 and two of 2.
    problem = Problem(module, PackedShape((256, 0, 9, 130), (768, 50, 128, 200), 1, 1))
    found = simulation.deal(problem, times, chip)
    assert problem.steps_in_order == [6, 6, 1, 2, 2]
    # Both are through with their first tile at once; the one that takes a tile of 1 is first to be free again.
    assert sorted(found.places) == [(6, 1, 2), (6, 2)]

    def end(*tiles: int) -> float:
        return simulation.simulate(module, found.times, Settings(2, 1, tiles)).end

    lasts = {n: end(n, n) - end(n) for n in (1, 2)}
    assert found.cycles == pytest.approx(end(6) + lasts[1] + lasts[2])
    assert found.balance == pytest.approx((end(6) + (lasts[1] + lasts[2]) / 2 + lasts[2] / 2) / found.cycles)
    assert found.tflops == pytest.approx(problem.flops * chip.clock_hz.value / found.cycles / 1e12)
    assert (
        found.first_tiles(100) == found.places[0]
        and found.first_tiles(7) == found.places[0][: len(found.places[0]) - 1]
    )
    assert found.first_tiles(1) == (6,)


def test_ctas_that_share_an_sm_deal_out_to_more_places() -> None:
    module = spec("fwd_packed_short_d64_causal")
    problem = Problem(module, PackedShape((64,) * 300, (128,) * 300, 1, 1))
    found = simulation.deal(problem, simulation.times_of(module, chips.H200), chips.H200)
    assert simulation.settings_of(module).ctas == 2
    assert sorted(map(len, found.places)) == [1] * (2 * 2 * 132 - 300) + [2] * (300 - 2 * 132)


def test_rows_of_pages_take_a_warps_instructions() -> None:
    boxes, rows = (simulation.times_of(spec(f"fwd_paged{kind}_d64"), chips.H200) for kind in ("", "_rows"))
    assert boxes.copies == () and rows.copy_q is None
    # 128 rows of 8 times 16 bytes, 32 at a time, 6 instructions each; four warps could issue at once.
    assert rows.copy_k is not None and (rows.copy_k.chain, rows.copy_k.issue) == (32 * 6, 32 * 6 / 4)
    assert work.step(spec("fwd_paged_rows_d64")).tma_loads == 0 < work.step(spec("fwd_paged_d64")).tma_loads


def test_measured_cells_are_those_of_the_records() -> None:
    """And `spread` says how far apart they are, list by list."""
    [variant] = attention_only(CHECKOUT.resolve("fwd_fp16_packed_d128_causal"), "the test")
    found = list(comparison.cells(CHECKOUT, [variant]))
    measured = [
        result.tflops
        for record in packed_records.load_all(CHECKOUT)
        for result in record.results
        if record.problem.label.startswith("fp16 d128 causal packed") and result.stem == variant.stem
    ]
    assert sorted(cell.measured or 0.0 for cell in found) == sorted(measured)
    assert {cell.problem for cell in found} >= {"chat16k, 16 heads", "documents64k, 32/8 heads"}
    cell = comparison.Cell("a", "short", "16", None, 1, 200.0, 200.0, 100.0)
    cells = [cell, replace(cell, measured=150.0), replace(cell, measured=None), replace(cell, name="long")]
    assert comparison.spread(cells) == (
        "- short: 2 cells, measured over predicted from 0.50 to 0.75, 0.62 in the median.\n"
        "- long: 1 cell, measured over predicted from 0.50 to 0.50, 0.50 in the median.\n"
    )


def test_a_document_without_its_marks_is_refused() -> None:
    with pytest.raises(UserError, match="comparison:begin"):
        comparison.with_blocks("nothing here", {"comparison": "x"})


# -- picture and command


@pytest.fixture
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "100")


def test_the_picture_shows_every_span() -> None:
    found = run(one_warpgroup("k4_2_d64"), TINY, tiles=2)
    picture = simulation.svg(found, "a < b")
    root = ET.fromstring(picture)
    name = "{http://www.w3.org/2000/svg}"
    boxes = [rect for rect in root.iter(f"{name}rect") if rect.find(f"{name}title") is not None]
    assert len(boxes) == sum(len(lane.spans) for lane in lanes(found))
    scores = [rect for rect in boxes if rect.get("class") == "scores"]
    texts = [title.text for rect in scores for title in rect.iter(f"{name}title")]
    assert texts == ["S = Q K^T, tile 0: 300 to 400, 100 cycles", "S = Q K^T, tile 1: 850 to 950, 100 cycles"]
    # 1016 pixels for 1100 cycles, beginning at 168.
    assert float(scores[0].get("x", 0)) == pytest.approx(168 + 300 * 1016 / 1100, abs=0.01)
    assert "prefers-color-scheme: dark" in picture
    assert "a &lt; b" in picture


def test_ticks_are_few_and_round() -> None:
    for end in (1.0, 999.0, 12345.0, 1e6):
        step = tick_step(end)
        assert end / step <= TICKS
        assert str(step).rstrip("0") in ("1", "2", "5")


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["simulate", *arguments])
    told = capsys.readouterr()
    return code, told.out, told.err


@pytest.mark.usefixtures("in_the_checkout")
def test_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.process_time()
    code, out, _ = called(capsys, "k6_d128")
    assert time.process_time() - start < 3  # with starting Python; here without
    assert code == 0 and "\x1b" not in out
    for said in (
        "K stage 1",
        "warpgroup 1 products",
        "to issue O += P V",
        "this spec",
        "refused by the rules",
        "oldest first",
    ):
        assert said in out
    assert max(map(len, out.splitlines())) <= 120
    assert len(out.splitlines()) < 45


@pytest.mark.usefixtures("in_the_checkout")
def test_the_json_is_as_described(capsys: pytest.CaptureFixture[str]) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    _, out, _ = called(capsys, "k2_cp_async_d64", "k5_d64", "--json", "--stages", "2", "--tiles", "4")
    written = json.loads(out)
    jsonschema.validate(written, SCHEMA)
    assert [module["stem"] for module in written["modules"]] == ["k2_cp_async_d64", "k5_d64"]
    assert [row["stages"] for row in written["modules"][1]["stages"]] == [2]


@pytest.mark.usefixtures("in_the_checkout")
def test_overrides_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--load-latency", "5", "--load-rate", "100", "--product-time", "7", "--softmax-time", "9", "--ctas", "1"]
    _, out, _ = called(capsys, "k4_2_d64", "--json", "--stages", "2", "--arbitration", "even", *options)
    module = json.loads(out)["modules"][0]
    assert module["times"]["load_latency"] == 5 and module["times"]["load_rate"] == 100
    assert max(module["times"]["qk"]["tensor"], module["times"]["qk"]["smem"]) == 7
    assert module["settings"] == {"stages": 2, "ctas": 1, "tiles": [12], "arbitration": "even"}


@pytest.mark.usefixtures("in_the_checkout")
def test_lengths_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--stages", "2", "--lengths", "300,0,1x700", "--heads", "2", "--tiles", "5"]
    _, out, _ = called(capsys, "fwd_packed_d128_causal", *options)
    assert "3 sequences, 301 x 1000, 2 heads: 8 tiles of queries, 24 of keys" in out  # 3, 2 and 1, then 6
    assert "dealt out to 8 CTAs on 132 SMs" in out and "1 CTA on an SM, 3 tiles of keys" in out
    _, out, _ = called(capsys, "fwd_packed_d128_causal", *options, "--json")
    written = json.loads(out)
    jsonschema.validate(written, SCHEMA)
    problem = written["modules"][0]["problem"]
    assert (problem["lengths_q"], problem["lengths_k"], problem["tiles"]) == ([300, 0, 1], [300, 0, 700], 8)
    assert problem["tflops"] > 0


@pytest.mark.usefixtures("in_the_checkout")
def test_the_comparison_of_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [comparison.Cell("fwd_a", "chat16k", "16", 64, 1, 400.0, 500.0, 300.0)]
    monkeypatch.setattr(comparison, "cells", lambda workspace, variants: iter(cells))
    _, out, _ = called(capsys, "k5_d64", "--compare")
    assert "fwd_a" in out and "chat16k, 16 heads, pages of 64" in out and "0.60 to 0.75" in out
    assert "chat16k: 1 cell, measured over predicted from 0.60 to 0.60" in out
    cells.clear()
    code, _, err = called(capsys, "k5_d64", "--compare")
    assert code == 2 and "no record holds speeds of k5_d64" in err


@pytest.mark.usefixtures("in_the_checkout")
def test_the_picture_is_written(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{tmp_path}/k5.svg"
    code, out, _ = called(capsys, "k5_d128", "--stages", "2", "--svg", path)
    assert code == 0 and path in out
    assert ET.parse(path).getroot().tag.endswith("svg")


@pytest.mark.usefixtures("in_the_checkout")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["k6_d12"], "did you mean 'k6_d128'"),
        (["k1_d64"], "no pipeline to simulate"),
        (["k6_d64", "--stages", "0"], "from 1 to 16"),
        (["k6_d64", "--stages", "3..2"], "from 1 to 16"),
        (["k6_d64", "--stages", "two"], "from 1 to 16"),
        (["k6_d64", "--chip", "b200"], "h100 and h200"),
        (["k6", "--svg", "x.svg"], "name one of them"),
        (["k6_d64", "--lengths", "5,6"], "k6_d64 takes dense tensors, of which all sequences have one length"),
        (
            ["fwd_packed_d64", "--lengths", "chat17k"],
            "one of the lists chat16k, chat64k, documents64k, equal512, equal1k, prefill1k_on_8k",
        ),
        (["fwd_packed_d64", "--lengths", "0,0x7"], "there are no rows of queries, or of keys"),
        (["fwd_packed_d64", "--heads", "5"], "give its --lengths, too"),
        (["k6_d64", "--compare", "--json"], "leave --json out"),
        (["k6_d64", "--stages", "1", "--svg", "/dev/null/x.svg"], "choose another --svg"),
    ],
)
def test_what_cannot_be_simulated(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    code, out, err = called(capsys, *arguments)
    assert (code, out) == (2, "")
    assert said in err and "Traceback" not in err
