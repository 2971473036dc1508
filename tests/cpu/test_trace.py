"""What a trace records: small kernels tick by tick, and a generated module against its plan."""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import jsonschema
import numpy as np
import pytest
from machine import Machine, aligned, tensor_map
from rendering import attention_stems, variants

from fa3gen.compile.cache import cached_compile
from fa3gen.cpu.findings import Hazard, Kind
from fa3gen.cpu.kernel import CpuKernel, Settings
from fa3gen.cpu.places import SharedPlaces
from fa3gen.cpu.schedule import FAST, Schedule, schedules
from fa3gen.cpu.trace import CtaTrace, Event, Trace
from fa3gen.cpu.trace_files import SCHEMA, Source, document, perfetto
from fa3gen.design import footprint
from fa3gen.design.family import Shape, call_of_lengths
from fa3gen.design.operation import Scalar, operation_of
from fa3gen.design.workspace import Workspace
from fa3gen.generate.plan import Plan, make_plan
from fa3gen.hardware import hopper
from fa3gen.inspect import tracing
from fa3gen.spec.model import Forward
from fa3gen.spec.specfile import Variant

ROOT = Path(__file__).resolve().parents[2]
WORKSPACE = Workspace.find(ROOT)
BY_WARP = Schedule("warp")


# ---------------------------------------------------------------------- small kernels


def recorded(body: str, *, schedule: Schedule = BY_WARP, **settings: Any) -> CtaTrace:
    """The only CTA of a kernel (tests/cpu/machine.py), recorded."""
    trace = Trace()
    Machine(body, trace=trace, **settings).run(schedule)
    (cta,) = trace.ctas
    return cta


def tick(cta: CtaTrace, warp: int, opcode: str, nth: int = 0) -> int:
    """Position, in the straight-line code of one warp, of the nth instruction that begins with `opcode`."""
    issued = [index for _, first, end in cta.warps[warp].stretches for index in range(first, end)]
    found = [place for place, index in enumerate(issued) if cta.kernel.instructions[index].mnemonic.startswith(opcode)]
    return found[nth]


def answered(event: Event) -> bool:
    """False for a wait that was told "not yet", as schedules with chance may do, and that is tried again."""
    return event.kind != "wait" or event.details["completed"] is not None


def only(cta: CtaTrace, kind: str, **details: Any) -> Event:
    (event,) = [
        event
        for event in filter(answered, cta.events)
        if event.kind == kind and details.items() <= {**event.details, "warps": event.warps}.items()
    ]
    return event


ARRIVE = """
setp.ne.u32 %p1, %t, 0;
@!%p1 mbarrier.init.shared.b64 [%s+8], 1;
@!%p1 fence.mbarrier_init.release.cluster;
bar.sync 0;
setp.ne.u32 %p2, %warp, 0;
@%p2 bra WAITS;
mov.u32 %r1, 1; mov.u32 %r2, 2; mov.u32 %r3, 3; mov.u32 %r4, 4; mov.u32 %r5, 5;
@!%p1 mbarrier.arrive.shared.b64 _, [%s+8];
ret;
WAITS:
mbarrier.try_wait.parity.shared.b64 %p3, [%s+8], 0;
@!%p3 bra WAITS;
"""


@pytest.mark.parametrize("schedule", schedules(10, 2), ids=str)
def test_a_wait_ends_with_the_arrival_that_it_waits_for(schedule: Schedule) -> None:
    cta = recorded(ARRIVE, threads=64, schedule=schedule)
    start = tick(cta, 0, "bar.sync")
    arrive = only(cta, "arrive", on="mbarrier", expected_bytes=0)
    # The branch after the barrier has two instructions, five moves follow.
    assert (arrive.warps, arrive.begin, arrive.end) == ((0,), start + 8, start + 9)
    assert arrive.details == {"on": "mbarrier", "place": 8, "phase": 0, "arrivals": 1, "expected_bytes": 0}
    wait = only(cta, "wait", on="mbarrier")
    assert (wait.warps, wait.end) == ((1,), max(start + 9, wait.begin + 1))
    tries = [event.begin for event in cta.events if event.kind == "wait" and event.details["on"] == "mbarrier"]
    assert (min(tries), max(tries)) == (start + 3, wait.begin)
    assert [event.end for event in cta.events if not answered(event)] == [begin + 1 for begin in tries[:-1]]
    assert wait.details == {"on": "mbarrier", "place": 8, "phase": 0, "completed": start + 9}
    assert cta.kernel.instructions[wait.instruction or 0].mnemonic.startswith("mbarrier.try_wait")
    barriers = [event for event in cta.events if event.kind == "wait" and event.details["on"] == "barrier"]
    assert sorted(warp for event in barriers for warp in event.warps) == [0, 1]
    assert {(event.begin, event.end) for event in barriers} == {(start, start + 1)}
    # Both return with one more instruction; the waiting warp has a branch before it.
    assert (cta.warps[0].clock, cta.warps[0].instructions, cta.warps[0].ended) == (start + 10, start + 10, True)
    assert (cta.warps[1].clock, cta.warps[1].ended) == (wait.end + 2, True)
    assert cta.warps[1].instructions == start + 6 + 2 * (len(tries) - 1)


def test_warps_of_one_group_wait_for_each_other_where_they_meet() -> None:
    body = """
    setp.ne.u32 %p1, %warp, 0;
    @%p1 bra MEET;
    mov.u32 %r1, 1; mov.u32 %r2, 2; mov.u32 %r3, 3;
    MEET:
    add.u32 %r4, %t, 1;
    """
    together = recorded(body, threads=64, schedule=FAST)
    split = tick(together, 0, "setp") + 2
    meet = only(together, "wait", on="warps")
    assert (meet.warps, meet.begin, meet.end) == ((1,), split, split + 3)
    assert [warp.clock for warp in together.warps] == [split + 5] * 2
    alone = recorded(body, threads=64)
    assert alone.events == []
    assert [warp.clock for warp in alone.warps] == [split + 5, split + 2]


def test_named_barriers() -> None:
    """bar.arrive does not wait; bar.sync waits for the last arrival."""
    body = """
    setp.ne.u32 %p1, %warp, 0;
    @%p1 bra SYNC;
    mov.u32 %r1, 1; mov.u32 %r2, 2; mov.u32 %r3, 3;
    bar.arrive 5, 64;
    ret;
    SYNC:
    bar.sync 5, 64;
    """
    cta = recorded(body, threads=64)
    split = tick(cta, 0, "setp") + 2
    arrive, wait = only(cta, "arrive"), only(cta, "wait")
    assert (arrive.warps, arrive.begin, arrive.end) == ((0,), split + 3, split + 4)
    assert arrive.details == {"on": "barrier", "number": 5}
    assert (wait.warps, wait.begin, wait.end) == ((1,), split, split + 4)
    assert wait.details == {"on": "barrier", "number": 5, "completed": split + 4}


def test_a_barrier_of_all_threads_completes_with_the_end_of_a_warp() -> None:
    body = """
    setp.ne.u32 %p1, %warp, 0;
    @%p1 bra SYNC;
    mov.u32 %r1, 1; mov.u32 %r2, 2; mov.u32 %r3, 3;
    ret;
    SYNC:
    bar.sync 0;
    """
    for schedule in (BY_WARP, Schedule("warp", "first", favourite=1)):
        cta = recorded(body, threads=64, schedule=schedule)
        wait = only(cta, "wait")
        assert wait.end == wait.details["completed"] == cta.warps[0].clock > wait.begin + 1


def test_registers_taken_when_there_are_enough() -> None:
    body = """
    setp.ge.u32 %p1, %warp, 4;
    @%p1 bra MORE;
    mov.u32 %r1, 1; mov.u32 %r2, 2; mov.u32 %r3, 3;
    setmaxnreg.dec.sync.aligned.u32 24;
    ret;
    MORE:
    setmaxnreg.inc.sync.aligned.u32 40;
    """
    cta = recorded(body, threads=160, registers=32, schedule=Schedule(order="first", favourite=4))
    less, more, wait = only(cta, "registers", action="dec"), only(cta, "registers", action="inc"), only(cta, "wait")
    assert (less.warps, less.details) == ((0, 1, 2, 3), {"action": "dec", "registers": 24})
    assert (wait.warps, wait.begin, wait.end) == ((4,), less.begin - 3, less.end)
    assert more.end == less.end


LOAD = """
setp.ne.u32 %p1, %t, 0;
@!%p1 mbarrier.init.shared.b64 [%s+2048], 1;
@!%p1 fence.mbarrier_init.release.cluster;
bar.sync 0;
@%p1 bra WAITS;
mbarrier.arrive.expect_tx.shared.b64 _, [%s+2048], 128;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
    [%s+1024], [%source, {4, 2}], [%s+2048];
mov.u32 %r1, 1; mov.u32 %r2, 2; mov.u32 %r3, 3;
WAITS:
mbarrier.try_wait.parity.shared.b64 %p3, [%s+2048], 0;
@!%p3 bra WAITS;
"""


@pytest.mark.parametrize("schedule", schedules(10, 2), ids=str)
def test_a_load_is_in_flight_until_somebody_waits_for_it(schedule: Schedule) -> None:
    source = aligned((8, 16), np.float32)
    maps = {"source": tensor_map(source, "f32", (8, 4))}
    cta = recorded(LOAD, buffers={"source_": source}, maps=maps, shared=4096, threads=64, schedule=schedule)
    load = only(cta, "load")
    assert load.warps == (0,)
    barrier = {"barrier": 2048, "phase": 0}
    assert load.details == {"place": 1024, "bytes": 128, "coordinates": [4, 2], **barrier}
    waits = [event for event in cta.events if event.kind == "wait" and event.details["on"] == "mbarrier"]
    waits = list(filter(answered, waits))
    assert load.end is not None
    assert load.end == max(load.begin + 1, min(wait.begin for wait in waits))
    for wait in waits:
        assert wait.end == max(wait.begin, load.begin) + 1
        assert wait.details["completed"] == load.end


def test_copies_of_cp_async_are_one_event_for_each_group() -> None:
    body = """
    shl.b32 %r1, %t, 4; add.u32 %r2, %s, %r1; cvt.u64.u32 %rd1, %r1; add.u64 %rd2, %source, %rd1;
    cp.async.cg.shared.global [%r2], [%rd2], 16;
    cp.async.cg.shared.global [%r2+512], [%rd2+512], 16;
    cp.async.commit_group;
    cp.async.cg.shared.global [%r2+1024], [%rd2+1024], 16;
    cp.async.commit_group;
    cp.async.wait_group 1;
    mov.u32 %r3, 1;
    cp.async.wait_group 0;
    """
    cta = recorded(body, buffers={"source": aligned((2048,), np.uint8)}, shared=2048)
    first, second = (event for event in cta.events if event.kind == "copies")
    begins = [tick(cta, 0, "cp.async.cg", number) for number in range(3)]
    waits = [tick(cta, 0, "cp.async.wait_group", number) for number in range(2)]
    assert (first.begin, first.end, first.details) == (begins[0], waits[0], {"place": 0, "bytes": 1024})
    assert (second.begin, second.end, second.details) == (begins[2], waits[1], {"place": 1024, "bytes": 512})
    found = [(event.begin, event.details["on"]) for event in cta.events if event.kind == "wait"]
    assert found == [(place, "copies") for place in waits]


def test_a_deadlock_leaves_waits_that_never_end() -> None:
    trace = Trace()
    body = ARRIVE.replace("@!%p1 mbarrier.arrive", "@%p1 mbarrier.arrive")  # of warp 0 all lanes but the right one
    body = body.replace("mov.u32 %r1, 1; mov", "ret; mov")
    with pytest.raises(Hazard) as report:
        Machine(body, threads=64, trace=trace).run(BY_WARP)
    assert report.value.kind is Kind.DEADLOCK
    (cta,) = trace.ctas
    (wait,) = [event for event in cta.events if event.end is None]
    assert (wait.kind, wait.warps) == ("wait", (1,))
    assert wait.details == {"on": "mbarrier", "place": 8, "phase": 0, "completed": None}
    assert [warp.ended for warp in cta.warps] == [True, False]


# ---------------------------------------------------------------------- a generated module

STEM = "k4_2_d64"
PROBLEM = tracing.Problem(Shape(1, 128, 310, 1, 1))
TILES = 5


def variant(stem: str = STEM) -> Variant:
    (found,) = WORKSPACE.resolve(stem)
    return found


def traced(schedule: Schedule, problem: tracing.Problem = PROBLEM) -> dict[str, Any]:
    """The document of one run of k4_2_d64."""
    trace, path = Trace(), WORKSPACE.module_path(STEM)
    assert tracing.run(path, variant(), problem, [(0, 0, 0)], schedule, trace) is None
    source = Source(STEM, f"generated/{STEM}.py", str(path), path.read_text(encoding="utf-8"))
    places = SharedPlaces.of(variant().spec)
    return document(trace, source, places, problem=problem.facts(variant().spec), schedule=str(schedule))


@cache
def trace_of_module() -> dict[str, Any]:
    return traced(BY_WARP)


def events_of(kind: str, written: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    (cta,) = (written or trace_of_module())["ctas"]
    return [event for event in cta["events"] if event["kind"] == kind]


def boxes(plan: Plan) -> int:
    """Boxes of one tile; all three operands of this module have the same swizzle."""
    assert plan.spec.smem is not None
    return -(-plan.problem.head_dim * 2 // hopper.SWIZZLE_SPAN[plan.spec.smem.q])


def test_loads_are_those_of_the_plan() -> None:
    plan = make_plan(variant())
    each = boxes(plan)
    expected = {"Q": each}
    for stage in range(plan.load.kv_stages):
        laps = len(range(stage, TILES, plan.load.kv_stages))
        expected |= {f"K stage {stage}": each * laps, f"V stage {stage}": each * laps}
    loads = events_of("load")
    assert Counter(load["label"] for load in loads) == expected
    rows = {"Q": plan.tile.m, "K": plan.tile.n, "V": plan.tile.n}
    for load in loads:
        assert load["details"]["bytes"] * each == rows[load["label"][0]] * plan.problem.head_dim * 2
        assert load["warps"] == [0]
        assert load["begin"] < load["end"]
    # From the last tile to the first: coordinates are (column, row, head, batch).
    keys = [load["details"]["coordinates"][1] for load in loads if load["label"].startswith("K")]
    assert keys == [tile * plan.tile.n for tile in reversed(range(TILES))]


def test_products_are_those_of_the_plan() -> None:
    plan = make_plan(variant())
    products = events_of("product")
    steps = plan.qk.steps, plan.pv.steps
    assert len(products) == TILES * plan.tile.warpgroups * sum(steps)
    labels = Counter(product["label"] for product in products)
    assert len(labels) == 2 * 2 * plan.load.kv_stages
    assert labels["warpgroup 1: Q x K stage 0"] == 3 * steps[0]
    assert labels["warpgroup 0: registers x V stage 1"] == 2 * steps[1]
    for product in products:
        group = product["details"]["warpgroup"]
        assert product["warps"] == [4 * group + warp for warp in range(4)]
        first_wait = min(
            wait["begin"]
            for wait in events_of("wait")
            if wait["details"]["on"] == "products"
            and wait["details"]["warpgroup"] == group
            and wait["details"]["products"] > product["details"]["number"]
        )
        assert product["begin"] < product["details"]["issued"] <= product["end"]
        assert product["end"] == max(product["details"]["issued"], first_wait)
        assert tuple(product["details"]["shape"]) in (plan.qk.instruction, plan.pv.instruction)


def test_arrivals_are_those_of_the_plan() -> None:
    """One announces the bytes of each phase of a full barrier; all warps give back each stage."""
    plan = make_plan(variant())
    warps = plan.tile.threads // hopper.WARP
    announced, released = Counter[str](), Counter[str]()
    for arrive in events_of("arrive"):
        assert arrive["details"]["arrivals"] == 1
        (announced if arrive["details"]["expected_bytes"] else released)[arrive["label"]] += 1
    phases = [(tile % plan.load.kv_stages, tile // plan.load.kv_stages) for tile in range(TILES)]
    full = {f"{ring}_full[{stage}] phase {phase}": 1 for ring in "kv" for stage, phase in phases}
    assert announced == {"q_full phase 0": 1, **full}
    assert released == {f"{ring}_empty[{stage}] phase {phase}": warps for ring in "kv" for stage, phase in phases}


def test_waits_are_those_of_the_plan() -> None:
    plan = make_plan(variant())
    warps, stages = plan.tile.threads // hopper.WARP, plan.load.kv_stages
    waits = Counter[str]()
    for wait in events_of("wait"):
        if wait["details"]["on"] == "mbarrier":
            waits[wait["label"]] += len(wait["warps"])
    phases = [(tile % stages, tile // stages) for tile in range(TILES)]
    expected = {"q_full phase 0": warps}
    for ring in "kv":
        expected |= {f"{ring}_full[{stage}] phase {phase}": warps for stage, phase in phases}
        # The producer waits for the phase before the one that it fills.
        expected |= {
            f"{ring}_empty[{stage}] {f'phase {phase - 1}' if phase else 'before its first phase'}": 1
            for stage, phase in phases
        }
    assert waits == expected


def causes(event: dict[str, Any], written: dict[str, Any]) -> list[int]:
    """Ticks at which what a wait waited for happened, found from the other events."""
    details = event["details"]
    if details["on"] == "mbarrier":
        phase = (details["place"], details["phase"])
        arrived = [
            e["end"]
            for e in events_of("arrive", written)
            if e["details"]["on"] == "mbarrier" and (e["details"]["place"], e["details"]["phase"]) == phase
        ]
        loads = events_of("load", written)
        return arrived + [e["end"] for e in loads if (e["details"]["barrier"], e["details"]["phase"]) == phase]
    if details["on"] == "products":
        return [
            e["end"]
            for e in events_of("product", written)
            if e["details"]["warpgroup"] == details["warpgroup"] and e["details"]["number"] < details["products"]
        ]
    if details["on"] == "barrier":
        return [e["begin"] for e in events_of("wait", written) if e["end"] == event["end"] and e["details"] == details]
    return []


@pytest.mark.parametrize("schedule", [BY_WARP, FAST, Schedule("warp", "random", "early", seed=5)], ids=str)
def test_no_wait_ends_before_what_it_waited_for(schedule: Schedule) -> None:
    written = trace_of_module() if schedule == BY_WARP else traced(schedule)
    seen = Counter[str]()
    for wait in events_of("wait", written):
        if wait["details"]["completed"] is None:
            assert schedule.order == "random" and wait["end"] == wait["begin"] + 1  # told "not yet"
            continue
        happened = causes(wait, written)
        seen[wait["details"]["on"]] += bool(happened)
        assert wait["end"] >= wait["details"]["completed"]
        assert wait["end"] > wait["begin"]
        assert all(wait["end"] >= tick for tick in happened), wait
    assert min(seen["mbarrier"], seen["products"], seen["barrier"]) > 0


def test_a_stage_is_not_filled_before_it_is_given_back() -> None:
    """What the trace is for, read from its own events: no load of a stage begins while products read it."""
    for ring in "KV":
        for stage in range(2):
            label = f"{ring} stage {stage}"
            loads = [event for event in events_of("load") if event["label"] == label]
            reads = [event for event in events_of("product") if event["label"].endswith(f"x {label}")]
            for load in loads:
                earlier = [read for read in reads if read["begin"] < load["begin"]]
                assert all(read["end"] <= load["begin"] for read in earlier)
                assert not any(load["begin"] <= read["begin"] < load["end"] for read in reads)


def test_times_do_not_depend_on_when_the_model_runs_whom() -> None:
    first = copy.deepcopy(trace_of_module())
    for schedule in schedules(10, 8):
        if schedule.granularity == "warp" and "random" not in (schedule.order, schedule.completion):
            again = traced(schedule)
            assert {**again, "schedule": first["schedule"]} == first, schedule


def test_the_document_is_one_of_its_schema_and_the_same_every_time() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    first = trace_of_module()
    jsonschema.validate(first, SCHEMA)
    again = traced(BY_WARP)
    assert json.dumps(again) == json.dumps(first)
    assert json.dumps(perfetto(again)) == json.dumps(perfetto(first))
    broken = copy.deepcopy(first)
    broken["ctas"][0]["events"][0]["details"]["surprise"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


def test_code_of_each_warp_is_all_its_time() -> None:
    (cta,) = trace_of_module()["ctas"]
    for warp in cta["warps"]:
        code = warp["code"]
        assert (code[0][0], code[-1][1]) == (0, warp["ticks"])
        assert all(
            before[1] == after[0] and before[2] != after[2] for before, after in zip(code, code[1:], strict=False)
        )
        assert {"attention_kernel", "softmax_step", "qk_product", "pv_product", "store_output"} <= {c[2] for c in code}
        assert warp["instructions"] + warp["waited"] == warp["ticks"]


# ---------------------------------------------------------------------- a persistent module

PERSISTENT = "fwd_d64_causal_short"


def test_events_of_a_persistent_kernel_are_those_of_its_plan() -> None:
    """One CTA takes 3 tiles of queries, with 3, 2 and 1 of keys: every ring goes round, its stages named alike."""
    spec, trace, path = variant(PERSISTENT).spec, Trace(), WORKSPACE.module_path(PERSISTENT)
    problem = tracing.Problem(Shape(1, 3 * 128, 3 * 128, 1, 1))
    assert tracing.run(path, variant(PERSISTENT), problem, [(0, 0, 0)], BY_WARP, trace) is None
    places = SharedPlaces.of(spec)
    text = Source(PERSISTENT, f"generated/{PERSISTENT}.py", str(path), path.read_text(encoding="utf-8"))
    written = document(trace, text, places, problem=problem.facts(spec), schedule="")
    loads = Counter((load["label"], *load["warps"]) for load in events_of("load", written))
    # Warp 8 loads Q and K, warp 9 loads V; a box each. 3 tiles of Q in 2 stages, 6 of K and V in 3.
    assert loads == {("Q stage 0", 8): 2, ("Q stage 1", 8): 1} | {
        (f"{ring} stage {stage}", warp): 2 for ring, warp in (("K", 8), ("V", 9)) for stage in range(3)
    }
    released = Counter[str]()
    for arrive in events_of("arrive", written):
        if arrive["details"]["on"] == "mbarrier" and not arrive["details"]["expected_bytes"]:
            released[arrive["label"].partition(" ")[0]] += 1
    # 8 consumer warps each time. One warp tells the number of a tile, 9 read it; the last of the 3 is none.
    assert released == {"q_empty[0]": 16, "q_empty[1]": 8, "tile_full[0]": 2, "tile_full[1]": 1} | {
        "tile_empty[0]": 18,
        "tile_empty[1]": 9,
    } | {f"{ring}_empty[{stage}]": 16 for ring in "kv" for stage in range(3)} | {"k_empty[0]": 24}
    # K's first stage once more: the S beside the last P V is of no tile, and its stage is given back all the same.
    # O of each tile is stored by 8 warps for themselves.
    stores = events_of("store", written)
    assert Counter(store["label"] for store in stores) == {"O": 24}
    assert {tuple(store["warps"]) for store in stores} == {(warp,) for warp in range(8)}


# ---------------------------------------------------------------------- every module, packed sequences, pages


@dataclass
class Noted:
    """Stands in for a kernel: keeps what it is called with."""

    settings: Settings = field(default_factory=lambda: Settings(sms=1))
    given: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> None:
        self.given = arguments


def test_every_launch_gets_the_arguments_of_its_operation() -> None:
    different = {}
    for stem in attention_stems():
        operation = operation_of(variants()[stem].spec)
        different[tuple((argument.name, len(getattr(argument, "dims", ()))) for argument in operation.arguments)] = stem
    assert len(different) > 12
    for stem in different.values():
        spec, kernel = variants()[stem].spec, Noted()
        problem = tracing.Problem(tracing.default_shape(spec))
        made = tracing.drawn(spec, problem)
        found = tracing.attention(cast(CpuKernel, kernel), spec, made)
        assert made.rows_of(found.out).shape[1] == sum(made.lengths) and made.rows_of_lse(found.lse).ndim == 3, stem
        for argument, given in zip(operation_of(spec).arguments, kernel.given, strict=True):
            if not isinstance(argument, Scalar):
                dims = 1 if argument.name == "sinks" else len(argument.dims)
                assert given.ndim == dims or given.numel() == 0, (stem, argument.name)


MOST_ROWS = 2**30  # of one sequence, as TMA sees it
LENGTHS = (200, 0, 5), (150, 0, 129)


def run_of(stem: str) -> list[Event]:
    """What happened in the only CTA of a module of head dim 64, as compiled for other tests: without line numbers."""
    trace, kernel, (found,) = Trace(), CpuKernel(cached_compile(WORKSPACE.module_path(stem))), WORKSPACE.resolve(stem)
    assert isinstance(found.spec, Forward)
    problem = tracing.Problem(call_of_lengths(found.spec, *LENGTHS, heads=(1, 1)))
    assert tracing.run_kernel(kernel, found, problem, [(0, 0, 0)], BY_WARP, trace) is None
    assert problem.facts(found.spec)["lengths_k"] == [150, 0, 129]
    return trace.ctas[0].events


def boxes_of(events: list[Event]) -> dict[tuple[int, int], int]:
    """(first row, row behind the sequence) of what TMA loads, and how often: row n of n has the number MOST_ROWS."""
    boxes = Counter[tuple[int, int]]()
    for event in events:
        if event.kind == "load":
            column, row, head, behind, most = event.details["coordinates"]
            assert (column, head, most) == (0, 0, MOST_ROWS)
            boxes[row - MOST_ROWS, behind] += 1
    return boxes


QUERIES = {(-200, 200): 1, (192 - 200, 200): 1, (-5, 205): 1}  # two tiles of the first sequence, one of the third


def test_loads_of_packed_sequences_are_clipped_at_their_ends() -> None:
    """Two tiles of keys of the first sequence for both of its tiles of queries, two of the third: K and V each."""
    keys = {(-150, 150): 4, (128 - 150, 150): 4, (-129, 279): 2, (128 - 129, 279): 2}
    assert boxes_of(run_of("fwd_packed_d64_causal")) == {**QUERIES, **keys}


def test_rows_of_pages_come_by_cp_async() -> None:
    events = run_of("fwd_paged_rows_d64_causal")
    assert boxes_of(events) == QUERIES
    groups = Counter(event.warps for event in events if event.kind == "copies")
    assert groups == {(12,): 6, (13,): 6}  # K by one warp, V by the other


# ---------------------------------------------------------------------- Chrome trace event format


def test_chrome_events_follow_the_rules_of_the_format() -> None:
    written = perfetto(trace_of_module())
    assert written["displayTimeUnit"] in ("ms", "ns")
    events = written["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "i", "b", "e", "C"}
    for event in events:
        assert {"ph", "name", "pid", "tid", "ts"} <= event.keys()
        assert all(isinstance(event[name], int) and event[name] >= 0 for name in ("pid", "tid", "ts"))
        if event["ph"] == "X":
            assert event["dur"] > 0
        if event["ph"] == "i":
            assert event["s"] == "t"
        if event["ph"] == "C":
            assert event["args"]["bytes"] >= 0
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert names == {(1, warp + 1): f"warp {warp} (warpgroup {warp // 4})" for warp in range(8)}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xi"} == names.keys()
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "k4_2_d64: attention_kernel CTA (0, 0, 0), CPU model, 1 us = 1 tick"
    ]
    assert "not a GPU" in written["otherData"]["executed_on"]


def test_chrome_asynchronous_events_are_balanced() -> None:
    open_: dict[tuple[Any, ...], int] = {}
    pairs = Counter[str]()
    for event in perfetto(trace_of_module())["traceEvents"]:
        key = tuple(event.get(name) for name in ("cat", "id", "pid", "name"))
        if event["ph"] == "b":
            assert key not in open_
            open_[key] = event["ts"]
        if event["ph"] == "e":
            assert event["ts"] >= open_.pop(key)
            pairs[event["cat"]] += 1
    assert not open_
    # A pair for each load and store, and for each commit group of each warpgroup.
    assert pairs == {"load": len(events_of("load")), "store": 1, "product": TILES * 2 * 2}


def test_chrome_slices_of_a_warp_nest() -> None:
    tracks: dict[int, list[dict[str, Any]]] = {}
    for event in perfetto(trace_of_module())["traceEvents"]:
        if event["ph"] == "X":
            tracks.setdefault(event["tid"], []).append(event)
    for slices in tracks.values():
        stack: list[int] = []
        for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
            while stack and stack[-1] <= event["ts"]:
                stack.pop()
            end = event["ts"] + event["dur"]
            assert not stack or end <= stack[-1], event
            stack.append(end)


# ---------------------------------------------------------------------- names


def test_places_are_those_that_the_header_prints() -> None:
    for stem in sorted(path.stem for path in WORKSPACE.generated_dir.glob("*.py")):
        spec = variant(stem).spec
        if not isinstance(spec, Forward):
            continue  # their headers have barriers in tables of their own
        plan, places = make_plan(variant(stem)), SharedPlaces.of(spec)
        rows = [line.split() for line in plan.header.smem[1:-1]]
        arrays: dict[str, list[int]] = {}
        for place in places.arrays:
            entry = arrays.setdefault(f"s{place.name}".replace("stiles", "tiles"), [place.offset, 0])
            entry[1] += place.bytes
        expected = {row[2]: [int(row[0]), int(row[1])] for row in rows if row[2] != "barriers"}
        assert arrays == expected, stem
        rows = [line.split() for line in plan.header.barriers[1:]]
        stages = Counter(place.name for place in places.barriers)
        names = [(row[0], row[1]) for row in rows]
        if plan.schedule.specialized:  # a row for both ends of a ring
            names = [(f"{name}_{end}", count) for name, count in names for end in ("full", "empty")]
            names = [name for name in names if plan.load.q_ring or name[0] != "q_empty"]
        found = [(name, str(count)) for name, count in stages.items()]
        if footprint.converts(spec):  # the header goes from K as stored to K as read, memory from both to both
            found, names = sorted(found), sorted(names)
        assert found == names, stem
        size = sum(place.bytes for place in places.barriers)
        assert size == footprint.barrier_bytes(spec), stem
        if places.barriers:
            first = min(place.offset for place in places.barriers)
            assert f"{first} " in [line for line in plan.header.smem if "barriers" in line][0]
            assert places.barrier(first) == (
                "q_full[0]" if plan.schedule.specialized and plan.load.q_ring else "q_full"
            )


def test_unknown_places_keep_their_offset() -> None:
    assert SharedPlaces().array(48) == "shared byte 48"
    assert SharedPlaces().barrier(48) == "mbarrier at shared byte 48"
