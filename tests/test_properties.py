"""Any spec: accepted ones fit the chip and render to modules that hold together, others are rejected with a reason."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rendering import CHECKOUT, attention_plans, attention_stems, tree, variants
from ruamel.yaml import YAML

from fa3gen.base.errors import SpecError
from fa3gen.design import footprint, rules, splits
from fa3gen.design.workspace import Workspace
from fa3gen.generate.formatting import format_module
from fa3gen.generate.plan import Plan, make_plan
from fa3gen.generate.render import render_variant
from fa3gen.hardware import hopper
from fa3gen.spec.model import Forward, Spec, TmaLoad
from fa3gen.spec.specfile import Variant

BOUNDED = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
Fields = dict[str, Any]

# Raw specs. Values are those that people write, those beside the limits, and a few that mean nothing.

SWIZZLES = st.sampled_from(["none", "32B", "64B", "128B"])
HEAD_DIMS = st.sampled_from([16, 32, 48, 64, 80, 96, 128, 192, 256, 40, 7, 0])
TILES = st.sampled_from([8, 16, 32, 48, 64, 80, 96, 112, 128, 176, 192, 256, 320, 1, -64])
STAGES = st.sampled_from([1, 2, 3, 4, 5, 8, 0])
MASKS: st.SearchStrategy[Any] = st.sampled_from(["none", "causal", {"kind": "causal"}]) | st.fixed_dictionaries(
    {"kind": st.just("window")}, optional={"left": st.integers(0, 4096), "right": st.integers(0, 4096)}
)
COUNTS = st.fixed_dictionaries({"threads": st.sampled_from([32, 64, 128, 256, 384, 512, 1024, 2048, 100])}) | (
    st.fixed_dictionaries({"warpgroups": st.integers(1, 9)})
)
LOADS: st.SearchStrategy[Any] = (
    st.just({"engine": "sync"})
    | st.fixed_dictionaries({"engine": st.just("cp_async"), "kv_stages": STAGES})
    | st.fixed_dictionaries(
        {"engine": st.just("tma"), "kv_stages": STAGES, "barrier": st.sampled_from(["shared", "separate"])},
        optional={"q_stages": st.sampled_from([1, 2, 3])},
    )
)
MAJORS = st.sampled_from(["k", "mn"])
SOURCES = st.sampled_from(["smem", "registers"])
PRODUCTS: st.SearchStrategy[Any] = st.just({"engine": "scalar"}) | st.fixed_dictionaries(
    {
        "engine": st.just("wgmma"),
        "a": st.fixed_dictionaries({"source": SOURCES, "major": MAJORS}),
        "b": st.fixed_dictionaries({"major": MAJORS}, optional={"source": SOURCES}),
    }
)
HANDOFFS: st.SearchStrategy[Any] = st.sampled_from(
    [{"through": "global_f32"}, {"through": "smem_f32"}, {"through": "registers"}]
) | st.fixed_dictionaries({"through": st.just("smem_16bit"), "swizzle": SWIZZLES})
SCHEDULES: st.SearchStrategy[Any] = st.just({"kind": "cooperative"}) | st.fixed_dictionaries(
    {"kind": st.sampled_from(["warp_specialized", "ping_pong"]), "overlap": st.booleans()}
)
# What most parts go with comes more often, or hardly a draw would be legal; the same below.
SCHEDULERS = st.sampled_from(["single_tile", "single_tile", "static", "stream_k", "dynamic", "even"])
O_WAYS = st.sampled_from(["over_q", "own_buffer", "direct"])
RESCALE_ABOVE = st.sampled_from([None, 1, 8, 9])
EXP_BEFORE_WAIT = st.sampled_from([None, None, None, None, None, 1, 12, 33])
MASK_END = st.sampled_from(["always", "always", "always", "when_cut"])
SMEMS: st.SearchStrategy[Any] = st.none() | st.fixed_dictionaries({"q": SWIZZLES, "k": SWIZZLES, "v": SWIZZLES})
JUNK: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def anything(draw: st.DrawFn) -> Fields:
    """Parts that may or may not go together."""
    return {
        "problem": {"head_dim": draw(HEAD_DIMS), "dtype": draw(st.sampled_from(["bf16", "fp16"]))},
        "mask": draw(MASKS),
        "tile": {"q": draw(TILES), "kv": draw(TILES), **draw(COUNTS)},
        "load": draw(LOADS),
        "smem": draw(SMEMS),
        "qk": draw(PRODUCTS),
        "pv": draw(PRODUCTS),
        "handoff": draw(HANDOFFS),
        "schedule": draw(SCHEDULES),
        "scheduler": draw(SCHEDULERS),
        "softmax": {
            "rescale_above": draw(RESCALE_ABOVE),
            "exp_before_wait": draw(EXP_BEFORE_WAIT),
            "mask_end": draw(MASK_END),
        },
        "outputs": {"lse": draw(st.booleans()), "o": draw(O_WAYS)},
    }


# After each tile of keys, after several, and of stripes.
ACCUMULATE = [{"promote_every": 1}, {"promote_every": 3}, {"promote_every": 1, "columns": 64}]


@functools.cache
def by_kind() -> dict[tuple[str, str], list[str]]:
    """Stems of committed attention by how tiles are loaded and P is handed over."""
    found: dict[tuple[str, str], list[str]] = {}
    for stem in sorted(attention_stems()):
        spec = variants()[stem].spec
        found.setdefault((spec.load.engine, spec.handoff.through), []).append(stem)
    return found


@st.composite
def neighbours(draw: st.DrawFn) -> Fields:
    """A committed spec of any kind with some of its fields replaced: often legal."""
    kind = draw(st.sampled_from(sorted(by_kind())))
    fields = variants()[draw(st.sampled_from(by_kind()[kind]))].spec.model_dump()
    replacements: dict[str, st.SearchStrategy[Any]] = {
        "problem.head_dim": HEAD_DIMS,
        "problem.head_dim_v": st.none() | HEAD_DIMS,
        "problem.dtype": st.sampled_from(["bf16", "fp16"]),
        "mask": MASKS,
        "accumulate": st.sampled_from([None, *ACCUMULATE]),
        "kv.dtype": st.sampled_from([None, "e5m2"]),
        "tile.q": TILES,
        "tile.kv": TILES,
        "tile.pack_heads": st.sampled_from([1, 2, 4, 8, 3]),
        "load.kv_stages": STAGES,
        "smem": SMEMS,
        "load.q_stages": st.sampled_from([1, 2, 3]),
        "schedule": SCHEDULES,
        "scheduler": SCHEDULERS,
        "softmax.rescale_above": RESCALE_ABOVE,
        "softmax.exp_before_wait": EXP_BEFORE_WAIT,
        "softmax.mask_end": MASK_END,
        "outputs.lse": st.booleans(),
        "outputs.o": O_WAYS,
    }
    for path in draw(st.sets(st.sampled_from(sorted(replacements)), max_size=4)):
        part, _, key = path.partition(".")
        if not key:
            fields[part] = draw(replacements[path])
        elif key in fields[part]:
            fields[part][key] = draw(replacements[path])
    if fields["tile"]["warpgroups"]:
        fields["tile"]["warpgroups"] = draw(st.sampled_from([max(1, fields["tile"]["q"] // 64), 2]))
    return fields


DIMS = [(64, None), (64, 128), (96, None), (128, None), (128, 64), (128, 96), (192, 128), (256, None)]  # and of v
# The field of a persistent kernel -> what people choose there; most combinations that fit are legal.
PERSISTENT_CHOICES: dict[str, st.SearchStrategy[Any]] = {
    "dims": st.sampled_from(
        [(64, None), (64, 128), (96, None), (128, None), (128, 64), (128, 96), (192, 128), (256, None)]
    ),
    "dtype": st.sampled_from(["bf16", "fp16"]),
    "mask": st.sampled_from([("static", "none"), ("stream_k", "none"), ("dynamic", "causal")]),
    "kind": st.sampled_from(["warp_specialized", "ping_pong"]),
    "warpgroups": st.sampled_from([1, 2, 2, 3]),
    "kv": st.sampled_from([16, 48, 64, 80, 112, 128, 176, 256]),
    "q_stages": st.sampled_from([1, 2]),
    "kv_stages": st.sampled_from([1, 2, 3]),
    "o": st.sampled_from(["own_buffer", "direct"]),
    "o_dtype": st.sampled_from([None, None, "fp32", "bf16"]),
    "rescale_above": st.sampled_from([None, 1, 8]),
    "exp_before_wait": st.sampled_from([None, 1, 4]),
    "mask_end": MASK_END,
    "swizzles": st.sampled_from([("64B", "64B", "64B"), ("128B", "128B", "128B"), ("32B", "128B", "64B")]),
}


@st.composite
def persistents(draw: st.DrawFn) -> Fields:
    """Persistent kernels with any of their fields: own_buffer with one Q buffer, direct with two, one alone, fp16."""
    chosen = {name: draw(choice) for name, choice in PERSISTENT_CHOICES.items()}
    (head_dim, v_dim), (scheduler, mask) = chosen["dims"], chosen["mask"]
    fields = variants()["fwd_d128"].spec.model_dump()
    stages = {name: chosen[name] for name in ("q_stages", "kv_stages")}
    return {
        **fields,
        "problem": {"head_dim": head_dim, "head_dim_v": v_dim, "dtype": chosen["dtype"]},
        "mask": mask,
        "tile": {"q": 64 * chosen["warpgroups"], "kv": chosen["kv"], "warpgroups": chosen["warpgroups"]},
        "load": {"engine": "tma", "barrier": "separate", **stages},
        "smem": dict(zip("qkv", chosen["swizzles"], strict=True)),
        "schedule": {"kind": chosen["kind"], "overlap": True},
        "scheduler": scheduler,
        "softmax": {name: chosen[name] for name in ("rescale_above", "exp_before_wait", "mask_end")},
        "outputs": {"o": chosen["o"], "lse": True},
        "o": {"dtype": chosen["o_dtype"]},
    }


@st.composite
def forms(draw: st.DrawFn) -> Fields:
    """Kernels of the K4 kind in every form of their operands, with contiguous sequences, other swizzles and tiles."""
    fields = variants()[draw(st.sampled_from(["k4_2_d64", "k4_smem_d64"]))].spec.model_dump()
    in_smem = fields["handoff"]["through"] == "smem_16bit"
    warpgroups, source = draw(st.sampled_from([1, 2, 3])), draw(SOURCES)
    a_major = draw(MAJORS) if source == "smem" else "k"
    return {
        **fields,
        "problem": {"head_dim": draw(st.sampled_from([32, 64, 80, 96, 128])), "dtype": "bf16"},
        "tile": {"q": 64 * warpgroups, "kv": draw(st.sampled_from([32, 48, 64, 80, 128])), "warpgroups": warpgroups},
        "smem": {name: draw(SWIZZLES) for name in "qkv"},
        "qk": {**fields["qk"], "a": {"source": source, "major": a_major}, "b": {"major": draw(MAJORS)}},
        "pv": {
            **fields["pv"],
            "a": {"source": "smem", "major": draw(MAJORS)} if in_smem else {"source": "registers", "major": "k"},
            "b": {"major": draw(MAJORS)},
        },
        "handoff": {"through": "smem_16bit", "swizzle": draw(SWIZZLES)} if in_smem else fields["handoff"],
        "outputs": {"o": draw(st.sampled_from(["over_q", "direct"])), "lse": draw(st.booleans())},
    }


SPECS = anything() | neighbours() | persistents() | forms()


def accepted(fields: Fields) -> Spec | None:
    """The spec, or None when it is rejected for a reason that it gives."""
    try:
        spec = Forward.model_validate(fields)
    except ValidationError as error:
        assert error.error_count() > 0
        return None
    violations = rules.check(spec)
    assert all(violation.field and violation.message for violation in violations)
    return None if violations else spec


def variant(spec: Spec) -> Variant:
    return Variant("x", spec, Path("specs/x.yaml"), "Some spec")


# What holds for every accepted spec


@settings(BOUNDED, max_examples=400)
@given(SPECS)
def test_accepted_specs_fit_the_chip(fields: Fields) -> None:
    spec = accepted(fields)
    if spec is None:
        return
    plan = make_plan(variant(spec))
    held = sum(count for _, count in footprint.registers_per_thread(spec))
    assert 0 <= plan.smem.total_bytes <= 232448
    assert held <= 255
    if plan.schedule.specialized:
        check_budgets(spec, plan, held)
    else:
        assert plan.tile.threads * held <= 65536
    assert 32 <= plan.tile.threads <= 1024 and plan.tile.threads % 32 == 0
    assert all(region.bytes > 0 for region in plan.smem.regions)
    assert plan.smem.total_bytes >= sum(region.bytes for region in plan.smem.regions) + plan.smem.barrier_bytes
    check_expectation(spec, plan)
    check_barriers(plan)


def check_budgets(spec: Spec, plan: Plan, held: int) -> None:
    """setmaxnreg only moves registers: the sum over the warpgroups is within what they were launched with."""
    schedule, consumers, launched = plan.schedule, plan.tile.warpgroups, plan.expectation.max_registers
    converting, transposing = footprint.converting_warpgroups(spec), footprint.transposing_warpgroups(spec)
    groups = consumers + 1 + converting + transposing
    assert launched is not None and plan.tile.threads == 128 * groups
    assert held <= schedule.consumer_registers
    given = schedule.producer_registers + consumers * schedule.consumer_registers
    given += converting * footprint.converter_registers(spec) if converting else 0
    given += transposing * footprint.transposer_registers(spec) if transposing else 0
    assert given <= groups * launched
    assert schedule.producer_registers <= launched <= schedule.consumer_registers
    assert all(24 <= n <= 256 and n % 8 == 0 for n in (schedule.producer_registers, schedule.consumer_registers))
    assert plan.schedule.ping_pong <= (consumers > 1)


def check_expectation(spec: Spec, plan: Plan) -> None:
    """The parts of the prediction agree with each other and with the plan."""
    expected = plan.expectation
    products = [product for product in (plan.qk, plan.pv) if product.engine == "wgmma"]
    assert expected.wgmma is not None
    of_qk, of_pv = product_copies(plan)
    copies = of_qk, of_pv * footprint.stripes(plan.spec)  # of O, each of which has a product with V of its own
    assert sum(count or 0 for count in expected.wgmma.values()) == sum(
        times * product.steps for times, product in zip(copies, products, strict=False)
    )
    assert expected.wgmma_commits == expected.wgmma_waits == sum(copies[: len(products)])
    assert bool(expected.setmaxnreg) == plan.schedule.specialized
    for product in products:
        m, n, k = product.instruction
        assert (m, k) == (64, spec.element.wgmma_k) and 8 <= n <= 256 and n % 8 == 0 and product.steps >= 1
    assert expected.smem_bytes == plan.smem.total_bytes
    assert expected.mbarrier_inits == plan.smem.barrier_bytes // 8
    if plan.p.through != "global_f32":
        check_sass(spec, plan)
    assert expected.max_registers is not None and expected.max_registers * plan.tile.threads <= 65536
    tma = plan.load.engine == "tma"
    assert bool(expected.tma_loads) == bool(expected.mbarrier_inits) == bool(expected.mbarrier_expect_tx) == tma
    assert bool(expected.cp_async) == ("cp_async" in (plan.load.engine, plan.load.pages))
    through_smem = plan.pv.engine == "wgmma" and spec.outputs.o != "direct"
    assert bool(expected.tma_stores) == through_smem
    assert bool(expected.stmatrix) == (through_smem or plan.p.through == "smem_16bit" or transposes(plan))
    to_registers = plan.qk.a_source == "RMEM" or footprint.by_warps(spec)  # Q
    assert bool(expected.ldmatrix) == (to_registers or transposes(plan))
    if plan.load.engine == "cp_async":
        # Every thread copies alike: whole vectors of the tiles of Q, and of K and V in the prefetch and in the loop.
        rows = spec.tile.q + (2 * plan.load.kv_stages + 2) * spec.tile.kv
        assert expected.cp_async == rows * spec.problem.head_dim / 8 / plan.tile.threads


def product_copies(plan: Plan) -> tuple[int, int]:
    """How often Q K^T and P V stand in the code: once in each loop; with overlap once more, before it and after it.

    Tiles of keys with an edge have a loop of their own, those with either edge of a window one each. Where the next Q
    is there in time, its first Q K^T stands beside the last P V of the tile before, and the very first before all.
    """
    if not plan.schedule.overlap:
        return 1, 1
    loops = {"all": 1, "before": 2, "between": 3, "none": 1}[plan.mask.full_tiles]
    return loops + 1 + (plan.scheduler.persistent and plan.load.q_stages > 1), loops + 1


def check_sass(spec: Spec, plan: Plan) -> None:
    """The computing threads compare each of their scores once or more, and write all of O once."""
    sass, threads = plan.expectation.sass, 128 * plan.tile.warpgroups or plan.tile.threads
    scores = spec.tile.q * spec.tile.kv // threads
    assert sass.waits == plan.expectation.wgmma_waits
    assert sass.min_maxima is not None and sass.min_maxima > scores
    softmaxes = product_copies(plan)[1]  # of the code, over all of which comparisons are counted
    # As many only where a tile has so few keys that those at the end of the kernel come near; a thread has one of each
    # of its rows at least, also where a tile has fewer keys than a row has threads.
    most = 2 * max(scores, footprint.thread_rows(spec)[0]) * softmaxes
    assert sass.max_comparisons is not None and sass.max_comparisons <= most
    assert sass.global_stores is not None
    bits = {"STG.16": 16, "STG.32": 32, "STG.64": 64, "STG.128": 128}
    written = sum(bits.get(kind, 0) * count for kind, count in sass.global_stores.items())
    written -= 32 * plan.scheduler.draws  # the counter of tiles, set back to zero
    # A part of O in float32, a maximum and a sum of two rows, and the flag, which is set and set back.
    written -= 32 * (plan.scheduler.kind == "stream_k") * (spec.tile.q * spec.problem.v_dim // threads + 2 * 2 + 2)
    element = 32 if spec.o.dtype == "fp32" else 16
    o_bits = 0 if plan.expectation.tma_stores else spec.tile.q * spec.problem.v_dim * element // threads
    # Rows that a thread writes: one where there are fewer rows than quads.
    lse_rows = max(1, spec.tile.q * (16 if plan.pv.engine == "scalar" else 4) // threads)
    if splits.whole_parts(spec):  # a part's O in float32, maxima and sums; of a row two columns of O, and LSE
        assert written == 32 * (spec.tile.q * spec.problem.v_dim // threads + 2 * lse_rows + 2)
        return
    if spec.split is not None:  # a part's O in float32 and LSE, and O and LSE of a row whose parts are added up
        written -= 32 * (spec.tile.q * spec.problem.v_dim // threads + lse_rows + 1) + 16
        written -= 32 * splits.share_words(spec) * (spec.scheduler == "even")  # where a cut tile lies
    if plan.scheduler.deals_rows:  # a lane's columns of a row that a warp adds up alone, and its LSE
        written -= spec.problem.v_dim // 32 * element + 32
    assert written == o_bits + 32 * lse_rows * spec.outputs.lse


def check_barriers(plan: Plan) -> None:
    """Every barrier in the header's table has a producer and a consumer, and full and empty come in pairs."""
    rows = [re.split(r" {2,}", row) for row in plan.header.barriers[1:]]
    assert bool(rows) == (plan.load.engine == "tma")
    if plan.schedule.specialized:
        check_specialized_rings(plan, rows)
        return
    names = [name for name, *_ in rows]
    for _, stages, edge, completes in rows:
        producer, consumer = edge.split(" -> ")
        assert producer and consumer and producer != consumer
        assert int(stages) >= 1 and int(completes.split()[0]) > 0
    rings = [name.removesuffix("_full") for name in names if name.endswith("_full") and name != "q_full"]
    assert rings == {"shared": ["kv"], "separate": ["k", "v"], "none": []}[plan.load.barrier]
    assert sorted(names) == sorted(["q_full"] * bool(rows) + [f"{r}_{end}" for r in rings for end in ("full", "empty")])
    assert 8 * sum(int(stages) for _, stages, *_ in rows) == plan.smem.barrier_bytes


def check_specialized_rings(plan: Plan, rows: list[list[str]]) -> None:
    """Each row is a ring, with a full and an empty barrier for each stage."""
    loaded = ("k8", "k", "v8", "v") if plan.converts else ("k", "v", *["vt"] * transposes(plan))
    assert [name for name, *_ in rows] == ["q", *loaded, *["tile"] * plan.scheduler.tile_ring]
    for name, stages, edge, full, empty in rows:
        producer, consumers = edge.split(" -> ")
        assert producer and consumers and producer != consumers and int(stages) >= 1
        assert int(full.split()[0]) > 0
        if (name, plan.load.q_ring) == ("q", False):  # nobody gives it back
            assert (stages, empty) == ("1", "no reuse" if plan.scheduler.kind == "grid" else "the last K")
        else:  # of K and V that threads fill, by cp.async or converting, each reading thread arrives, else each warp
            gathered = plan.load.pages == "cp_async"
            by_threads = ("k", "v") * (gathered or plan.converts) + ("k8", "v8") * gathered
            arrivals = hopper.WARP if name in by_threads else 1
            assert int(empty.split()[0]) == int(consumers.split()[0]) * arrivals
    both_ends = 2 * 8 * sum(int(stages) for _, stages, *_ in rows)
    assert both_ends - 8 * (not plan.load.q_ring) == plan.smem.barrier_bytes


@settings(BOUNDED, max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(neighbours() | persistents())
def test_accepted_specs_render(fields: Fields) -> None:
    spec = accepted(fields)
    assume(spec is not None)
    assert spec is not None
    text = render_variant(variant(spec), CHECKOUT)
    module = ast.parse(text)
    assert format_module(text) == text
    defined = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
    assert {"launch", "compile_for_sm90a", "attention"} <= defined
    check_names(module)
    check_rings(module, make_plan(variant(spec)))


def test_committed_modules_have_the_properties_of_any() -> None:
    """What random specs are held to: a new kind of module that these checks do not know is noticed when it comes."""
    for stem, plan in attention_plans().items():
        try:
            check_names(tree(stem))
            check_rings(tree(stem), plan)
            check_barriers(plan)
            check_expectation(plan.spec, plan)
        except AssertionError as wrong:
            raise AssertionError(f"{stem}: {wrong}") from wrong


def check_names(module: ast.Module) -> None:
    """Every function that is called by name is defined or imported, with as many arguments as it takes."""
    defined = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    for call in (node for node in ast.walk(module) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        assert isinstance(call.func, ast.Name)
        function = defined.get(call.func.id)
        if function is not None and not call.keywords and not any(isinstance(x, ast.Starred) for x in call.args):
            most = len(function.args.args)
            least = most - len(function.args.defaults)
            if function.args.vararg is None:
                assert len(call.args) <= most, call.func.id
            assert least <= len(call.args), call.func.id


def check_rings(module: ast.Module, plan: Plan) -> None:
    """In the code, too: each ring is filled by TMA, waited for and released; acquired as often as it is filled."""
    calls = [ast.unparse(node.func) for node in ast.walk(module) if isinstance(node, ast.Call)]
    if plan.schedule.specialized:
        check_code_of_rings(calls, plan)
        return
    names = {"shared": ["kv_ring"], "separate": ["k_ring", "v_ring"], "none": []}[plan.load.barrier]
    # In the prefetch and in the loop; kernels with both products on WGMMA have a function for it.
    filled = 1 if "load_kv" in calls else 2
    assert calls.count("load_kv") == (2 if filled == 1 else 0)
    for ring in names:
        assert calls.count(f"{ring}.producer_acquire") == calls.count(f"{ring}.producer_get_barrier") == filled
        assert calls.count(f"{ring}.consumer_wait") == calls.count(f"{ring}.consumer_release") == 1
    used = {call.partition(".")[0] for call in calls if ".producer_" in call or ".consumer_" in call}
    assert used == set(names)
    if names:
        assert calls.count("cute.arch.mbarrier_arrive_and_expect_tx") == calls.count("cute.arch.mbarrier_wait") == 1
        assert calls.count("cute.arch.mbarrier_init") == 1


def transposes(plan: Plan) -> bool:
    """Whether warps make V transposed, in a ring of its own."""
    return plan.eight_bit is not None and plan.eight_bit.transposes


def check_code_of_rings(calls: list[str], plan: Plan) -> None:
    """Of a specialised kernel: with overlap, `multiply` takes K and V and gives back K, `finish_step` gives back V."""
    stored, released = "8" * plan.converts, plan.load.q_ring  # of K and V as they lie in memory
    rings = ["q_ring", f"k{stored}_ring", f"v{stored}_ring"]
    # The first K of a tile comes before Q where nobody gives Q's place back.
    filled = [1, 1, 1] if released else [0, 2, 1]
    assert [calls.count(f"{ring}.producer_acquire") for ring in rings] == filled
    by_tma = [filled[0], 0, 0] if plan.load.pages == "cp_async" else filled
    assert [calls.count(f"{ring}.producer_get_barrier") for ring in rings] == by_tma
    announced = ("cute.arch.mbarrier_arrive_and_expect_tx", "cute.arch.mbarrier_wait", "cute.arch.mbarrier_init")
    assert [calls.count(call) for call in announced] == [not released] * 3
    placed = plan.scheduler.kind == "grid"
    assert calls.count("k_ring.sync_object_empty.wait") == (not released and not placed)
    overlap, flattened = plan.schedule.overlap, plan.schedule.flattened
    lets_go = plan.mask.skips_absent  # of both, one loop more
    assert flattened == (plan.load.q_stages > 1 and plan.scheduler.persistent and overlap)
    for ring, waits, releases in (
        ("q", (1 + flattened) * released, int(released)),
        ("k", *[1 + overlap + flattened + lets_go] * 2),
        ("v", *([1, 1] if transposes(plan) else [1 + overlap + lets_go] * 2)),
        ("vt", (1 + overlap) * transposes(plan), 0),
    ):
        assert calls.count(f"{ring}_ring.consumer_wait") == waits
        assert calls.count(f"{ring}_ring.consumer_release") == releases
    # Consumers give a stage of V transposed back by one arrival of each warp.
    assert calls.count("release_by_warp") == (1 + overlap) * transposes(plan)
    assert calls.count("vt_ring.producer_acquire") == calls.count("vt_ring.producer_commit") == transposes(plan)
    dynamic, even = plan.scheduler.draws, plan.scheduler.kind == "even"
    told, packed = plan.scheduler.tile_ring, plan.problem.packed_sequences
    for call in ("producer_commit", "consumer_wait", "consumer_release"):
        assert calls.count(f"tile_ring.{call}") == told
    apart = packed and not plan.scheduler.packed_shares  # of one tile: the first, or that none is left
    assert calls.count("tile_ring.producer_acquire") == told + apart
    # Three roles walk through the work: two producer warps and the consumers; one of them may draw it. Of packed
    # sequences a warp more finds it for all, and where tiles are drawn the one that loads K says when. Who transposes V
    # is a role more, who converts K and who converts V are two.
    roles = 3 + transposes(plan) + 2 * plan.converts - plan.load.together  # of both producer warps' loads
    assert (calls.count("draw_work"), calls.count("next_work")) == (dynamic and not packed, roles - dynamic - placed)
    begun = 1 + packed + even + 2 * packed * plan.converts  # who converts asks for the first tile, as consumers do
    assert (calls.count("first_work"), calls.count("read_tile")) == (begun, 4 * packed - 2 * even)
    # Around each place with products, and at both ends of all; and where a turn is of keys that only others see.
    turns = [calls.count(name) for name in ("wait_turn", "pass_turn")]
    each = (4 if overlap else 2) + plan.mask.by_consumer
    assert turns == ([each, each] if plan.schedule.ping_pong else [0, 0])
    qk, pv = product_copies(plan)
    loops = calls.count("multiply")
    # With overlap a product stands in `multiply`, which stands in each loop; without, in the one loop.
    # Of stripes the first P V and the others stand in a function of both.
    found = calls.count("qk_product"), calls.count("pv_product")
    striped = bool(plan.eight_bit and plan.eight_bit.striped)
    assert found == (qk - loops + overlap, 2 if striped else pv - loops + overlap)
    assert (calls.count("multiply_first"), calls.count("finish_step")) == (overlap, loops)
    # A ring that threads fill by cp.async is made by a function of its own: its one call serves K and V.
    gathered = plan.load.pages == "cp_async"
    assert calls.count("make_ring") == 2 * (not gathered) + released
    assert calls.count("make_gathered_ring") == 2 * gathered
    made = transposes(plan) + plan.converts  # of what threads make of tiles
    assert calls.count("pipeline.PipelineAsync.create") == told + gathered + made


# What holds for every other input


@settings(BOUNDED, max_examples=200)
@given(anything(), st.data())
def test_damaged_specs_raise_nothing_else(fields: Fields, data: st.DataObject) -> None:
    """One part replaced by anything at all: a ValidationError, or violations, or a legal spec; `accepted` lets no
    other error pass."""
    part = data.draw(st.sampled_from(sorted(fields)))
    inner = fields[part]
    if isinstance(inner, dict) and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(inner)) | st.text(max_size=8))
        fields[part] = {**inner, key: data.draw(JUNK)}
    else:
        fields[part] = data.draw(JUNK)
    accepted(fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("specs")


@settings(BOUNDED, max_examples=100)
@given(JUNK | st.dictionaries(st.sampled_from(["extends", "matrix", "summary", "problem", "mask", "tile"]), JUNK))
def test_any_yaml_file_is_loaded_or_explained(folder: Path, document: Any) -> None:
    path = folder / "x.yaml"
    with path.open("w", encoding="utf-8") as file:
        YAML(typ="safe", pure=True).dump(document, file)
    load_or_explain(path)


@settings(BOUNDED, max_examples=100)
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_explained(folder: Path, content: bytes) -> None:
    path = folder / "x.yaml"
    path.write_bytes(content)
    load_or_explain(path)


def load_or_explain(path: Path) -> None:
    try:
        Workspace(path.parent, path.parent).load(path)
    except SpecError as error:
        assert error.problems
        assert all(problem.path == Path("x.yaml") and problem.message for problem in error.problems)


# Round trip


def dumped(fields: Fields, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        YAML(typ="safe", pure=True).dump({"summary": "round trip", **fields}, file)


def test_round_trip_of_the_committed_specs(tmp_path: Path) -> None:
    """Spec -> YAML -> Spec is the identity, defaults written out."""
    for stem, committed in variants().items():
        path = tmp_path / f"{stem}.yaml"
        dumped(committed.spec.model_dump(), path)
        (loaded,) = Workspace(tmp_path, tmp_path).load(path).variants
        assert (loaded.stem, loaded.spec, loaded.source) == (stem, committed.spec, Path(f"{stem}.yaml"))


@settings(BOUNDED, max_examples=40)
@given(SPECS)
def test_round_trip(folder: Path, fields: Fields) -> None:
    """As written, and with all defaults written out."""
    spec = accepted(fields)
    if spec is None:
        return
    path = folder / "round.yaml"
    for written in (fields, spec.model_dump()):
        dumped(written, path)
        (loaded,) = Workspace(folder, folder).load(path).variants
        assert loaded.spec == spec


# The strategies themselves: a property that hardly ever meets an accepted or a rejected spec shows little.


def test_strategies_reach_both_sides() -> None:
    kinds: list[tuple[str, str] | None] = []

    @settings(BOUNDED, max_examples=500, database=None)
    @given(anything() | neighbours())
    def draw(fields: Fields) -> None:
        spec = accepted(fields)
        kinds.append((spec.load.engine, spec.handoff.through) if spec is not None else None)

    draw()
    legal = [kind for kind in kinds if kind]
    assert len(legal) >= 20 and kinds.count(None) >= 100, (len(legal), len(kinds))
    assert len(set(legal)) >= 4  # of six: sync with two handoffs, cp_async with one, tma with three


def test_strategies_reach_persistent_kernels() -> None:
    """Also those that no committed module is like."""
    kinds: list[tuple[str, str, int] | None] = []

    @settings(BOUNDED, max_examples=200, database=None)
    @given(persistents())
    def draw(fields: Fields) -> None:
        spec = accepted(fields)
        if spec is None:
            kinds.append(None)
            return
        assert isinstance(spec.load, TmaLoad)
        kinds.append((spec.scheduler, spec.outputs.o, spec.load.q_stages))

    draw()
    legal = [kind for kind in kinds if kind]
    assert len(legal) >= 60 and kinds.count(None) >= 20, (len(legal), len(kinds))
    assert len(set(legal)) == 12  # three schedulers, two ways of O, one or two buffers of Q


def test_the_limits_are_those_of_the_chip() -> None:
    assert (hopper.SMEM_PER_CTA, hopper.REGISTERS_PER_THREAD, hopper.REGISTERS_PER_SM) == (232448, 255, 65536)
