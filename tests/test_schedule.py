"""The schedule as data, held against the code: what each role waits for, multiplies, gives back and stores, in order.

The code is read as a syntax tree: a function that a role calls is followed into its body, with the names that its
arguments have there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

import pytest
from rendering import STEMS, attention_stems, constants, plans, source, variants

from fa3gen.design.cta import cta_of
from fa3gen.design.schedule import PLACES, Role, Schedule, Step, schedule_of
from fa3gen.design.schedule.cooperative import CTA_BARRIER, P_BARRIER
from fa3gen.design.schedule.specialized import K_CONVERTERS, MERGE_BARRIER, OUTPUT_BARRIER, V_CONVERTERS
from fa3gen.generate.header import PLACE_TITLES

FUSED = [stem for stem in attention_stems() if not stem.startswith("k1_")]
TENSORS = {"tma_Q": "Q", "tma_K": "K", "tma_V": "V", "gQ": "Q", "gK": "K", "gV": "V", "rows_K": "K", "rows_V": "V"}
OF_RINGS = {
    "producer_acquire": "wait_empty",
    "producer_commit": "fill",
    "consumer_wait": "wait_full",
    "consumer_release": "release",
}
CALLS = {
    "qk_product": ("product", "S"),
    "pv_product": ("product", "O"),
    "convert_units": ("convert", ""),
    "read_operand_q": ("read", "rQ"),
    "read_k": ("read", "rK"),
    "read_v": ("read", "rV"),
    "widen_k": ("convert", "K"),
    "widen_v": ("convert", "V"),
    "leave_sums": ("gather", "sums"),
    "merge_warps": ("read", "sums"),
    "store_lse_of_row": ("store", "LSE"),
    "store_row": ("store", "O"),
    "cap_scores": ("cap", ""),
    "read_scale": ("read_scale", ""),
    "read_sinks": ("read_sink", ""),
    "mask_scores": ("mask", ""),
    "mask_left_edge": ("mask", ""),
    "softmax_step": ("softmax", ""),
    "rescale_output": ("rescale", ""),
    "rescale_held": ("rescale", ""),
    "promote": ("promote", ""),
    "transpose_tile": ("transpose", "V"),
    "round_p": ("round", ""),
    "scatter_scores": ("store", "S"),
    "store_lse": ("store", "LSE"),
    "next_work": ("next", ""),
    "give_part": ("give_part", ""),
    "add_part": ("add_part", ""),
    "fold_part": ("add_part", ""),
    "store_sums": ("store", "sums"),
    "skip_turns": ("skip_turns", ""),
}
# Whose calls are no steps of their own.
WHOLE = ("make_barriers", "mask_scores", "transpose_tile", "drop", "let_go", "skip_turns")
COPIES = {
    "tma_O": ("store", "O"),
    "copy_O": ("gather", "O"),
    "copy_P": ("store", "P"),
    "copy_Q": ("read", "Q"),
}
ONLY = {
    "first": ("consumer == 0",),
    "first_warp": ("warp_idx == 0", "cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0"),
    "last": ("consumer == CONSUMERS - 1",),
}


ONE_PART = ("work.num_parts == 1", "work.slot < 0")  # else O and LSE are those of a part of the keys


@dataclass(frozen=True)
class Event:
    """A step as the code has it, and its line."""

    kind: str
    detail: str
    only: str = ""
    line: int = field(default=0, compare=False)


@dataclass
class Walk:
    """What a role does, place by place; `step` has a list for each loop over tiles of keys."""

    places: dict[str, list[Event]] = field(default_factory=lambda: {place: [] for place in PLACES})
    loops: list[list[Event]] = field(default_factory=list)


def expected(step: Step) -> Event:
    """What the code of a step looks like."""
    detail = step.what
    if step.kind in ("wait_empty", "wait_read", "fill", "wait_full", "release", "drop", "sync"):
        detail = step.on
    elif step.kind in ("wait_products", "wait_copies"):
        detail = str(step.in_flight)
    return Event(step.kind, detail, step.only)


class Reader:
    """Reads the events of one module."""

    def __init__(self, text: str) -> None:
        module = ast.parse(text)
        self.constants = constants(module)
        self.functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}

    def walk(self, role: Role) -> Walk:
        """Divide the events of a role's function into places, by its loops."""
        found, function = Walk(), self.functions[role.code]
        loop = next((node for node in function.body if isinstance(node, ast.While)), None)
        if loop is None:  # a CTA has one tile
            self._tile(found, function.body, "cta")
            return found
        at = function.body.index(loop)
        found.places["cta"] = list(self._block(function.body[:at]))
        self._tile(found, loop.body, "tile")
        found.places["exit"] = list(self._block(function.body[at + 1 :]))
        return found

    def _tile(self, found: Walk, body: list[ast.stmt], before: str) -> None:
        """A tile of queries: what comes before, in and after the loops over tiles of keys."""
        parts = [part for node in body for part in self._parts(node)]
        places = [index for index, part in enumerate(parts) if isinstance(part, list)]
        ahead = before == "cta" and len(places) == 2  # the first loop fills the stages
        place = before
        for index, part in enumerate(parts):
            if isinstance(part, Event):
                found.places[place].append(part)
            elif ahead and index == places[0]:
                found.places["ahead"] = part
                place = "tile"
            else:
                found.loops.append(part)
                place = "end"

    def _parts(self, node: ast.stmt, only: str = "") -> Iterator[Event | list[Event]]:
        """Events, and loops as lists of events."""
        if isinstance(node, ast.For):
            if events := list(self._block(node.body, only=only)):  # else no loop over tiles
                yield events
        elif isinstance(node, ast.If):
            for child in [*node.body, *node.orelse]:
                yield from self._parts(child, self._only(node, only))
        else:
            yield from self._block([node], only=only)

    @staticmethod
    def _only(node: ast.If, outer: str) -> str:
        tests = ast.unparse(node.test).split(" and ")
        return next((name for name, known in ONLY.items() if set(tests) & set(known)), outer)

    def _block(
        self, body: list[ast.stmt], names: Mapping[str, str] | None = None, only: str = "", inside: str = ""
    ) -> Iterator[Event]:
        """The events of some statements; `names` are those that a function's parameters have in its caller."""
        for node in body:
            if isinstance(node, ast.If) and ast.unparse(node.test) in ONE_PART:
                one, several = (list(self._block(branch, names, only, inside)) for branch in (node.body, node.orelse))
                assert one == several  # the same steps: what they write differs
                yield from one
            elif isinstance(node, ast.If):
                yield from self._calls(node.test, names or {}, only, inside)
                yield from self._block(node.body, names, self._only(node, only), inside)
                yield from self._block(node.orelse, names, only, inside)
            elif isinstance(node, ast.For) and "STRIPES" in ast.unparse(node.iter):  # which is written out
                for _ in range(self.constants["STRIPES"] - 1):
                    yield from self._block(node.body, names, only, inside)
            elif isinstance(node, ast.For | ast.While | ast.With):
                yield from self._block(node.body, names, only, inside)
            else:
                yield from self._calls(node, names or {}, only, inside)

    def _calls(self, node: ast.AST, names: Mapping[str, str], only: str, inside: str) -> Iterator[Event]:
        calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
        for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
            yield from (Event(kind, detail, only, call.lineno) for kind, detail in self._event(call, names, inside))
            if isinstance(call.func, ast.Name) and call.func.id in self.functions and call.func.id not in WHOLE:
                function = self.functions[call.func.id]
                parameters = [argument.arg for argument in function.args.args]
                inner = {
                    parameter: names.get(argument.id, argument.id)
                    for parameter, argument in zip(parameters, call.args, strict=False)
                    if isinstance(argument, ast.Name)
                }
                yield from self._block(function.body, inner, only, function.name)

    def _prologue(self, call: ast.Call) -> bool:
        """Whether it is in `find_tiles`, where one warp does before its first step what others did before theirs."""
        finds = self.functions.get("find_tiles")
        return finds is not None and finds.lineno <= call.lineno <= (finds.end_lineno or 0)

    def _event(self, call: ast.Call, names: Mapping[str, str], inside: str) -> Iterator[tuple[str, str]]:
        function = ast.unparse(call.func)
        owner, _, method = function.rpartition(".")
        first = ast.unparse(call.args[0]) if call.args else ""
        first = names.get(first, first)
        if method == "wait" and owner.endswith("_ring.sync_object_empty"):
            yield "wait_read", owner.removesuffix("_ring.sync_object_empty")
        elif method in OF_RINGS:
            yield OF_RINGS[method], names.get(owner, owner).removesuffix("_ring")
        elif function in CALLS:
            yield CALLS[function]
        elif function == "drop":
            yield "drop", first.removesuffix("_ring")
        elif function == "let_go":  # of both rings
            yield from (("drop", ast.unparse(ring).removesuffix("_ring")) for ring in call.args[:2])
        elif function == "warpgroup.wait_group":
            yield "wait_products", first
        elif function == "cute.arch.mbarrier_wait":
            yield "wait_full", first.removesuffix("_full")
        elif function == "cute.arch.mbarrier_arrive_and_expect_tx":
            yield "announce", first.removesuffix("_full").upper()
        elif function == "load_q":
            yield "load", "Q"
        elif function == "load_rows":
            yield "load", TENSORS[first]
        elif function == "load_tile":
            yield "load", TENSORS[re.split(r"\W", ast.unparse(call.args[1]))[0]]
        elif function == "cute.copy" and first in TENSORS:
            yield "load", TENSORS[first]
        elif function == "cute.copy" and first in COPIES:
            yield COPIES[first]
        elif function == "cute.autovec_copy" and inside in ("store_output", "store_f32"):
            yield "store", "O"
        elif function == "cute.arch.cp_async_commit_group":
            yield "commit", ""
        elif function == "cute.arch.cp_async_wait_group":
            # Of a tile that is told those that it consists of, however many are on their way behind it.
            yield "wait_copies", "0" if first == "on_their_way" else str(eval(first, {}, self.constants))
        elif function == "cute.arch.cp_async_bulk_wait_group":
            yield "wait_stores", ""
        elif function == "cute.arch.atomic_add":
            yield "draw", ""
        elif function == "cute.arch.sync_threads" and not self._prologue(call):
            yield "sync", CTA_BARRIER
        elif function in ("cute.arch.barrier", "cute.arch.barrier_arrive"):
            number = ast.unparse(call.keywords[0].value)
            if number.startswith("TURN_BARRIER"):
                yield "pass_turn" if function.endswith("arrive") else "wait_turn", ""
            else:
                yield "sync", number if number in (OUTPUT_BARRIER, MERGE_BARRIER) else P_BARRIER


def differences(text: str, schedule: Schedule) -> list[str]:
    """Where the code of a module and its schedule are not the same, one sentence each."""
    found, reader = [], Reader(text)
    for role in schedule.roles:
        walk = reader.walk(role)
        for place in PLACES:
            told = [expected(step) for step in schedule.of(role.name, place)]
            if place != "step":
                found += _compared(f"{role.name}, {place}", told, walk.places[place])
                continue
            if len(walk.loops) != len(role.loops):
                found.append(f"{role.name} has {len(walk.loops)} loops over tiles of keys, not {len(role.loops)}")
            for number, (masks, events) in enumerate(zip(role.loops, walk.loops, strict=False)):
                of_loop = [event for event in told if masks or event.kind != "mask"]
                found += _compared(f"{role.name}, loop {number}", of_loop, events)
    return found


def _compared(where: str, told: list[Event], events: list[Event]) -> list[str]:
    for number in range(max(len(told), len(events))):
        says = told[number] if number < len(told) else None
        does = events[number] if number < len(events) else None
        if says != does:
            line = f"line {does.line}: {does.kind} {does.detail} {does.only}".rstrip() if does else "nothing more"
            should = f"{says.kind} {says.detail} {says.only}".rstrip() if says else "nothing more"
            return [f"{where}, step {number + 1}: the code has {line}; the schedule says {should}"]
    return []


@cache
def schedule(stem: str) -> Schedule:
    return schedule_of(variants()[stem].spec)


@pytest.mark.parametrize("stem", FUSED)
def test_the_code_does_what_the_schedule_says(stem: str) -> None:
    assert differences(source(stem), schedule(stem)) == []


# What the test finds

MUTATED = [
    "fwd_d128_causal",
    "fwd_d64",
    "fwd_d192_128_window",
    "k6_sequential_d128",
    "k4_smem_d64",
    "k2_cp_async_d64_causal",
]


def statements(stem: str) -> Iterator[tuple[list[ast.stmt], list[int]]]:
    """The blocks of the functions that roles run through, each with the places of the statements that do a step."""
    reader, seen = Reader(source(stem)), set()
    names = [role.code for role in schedule(stem).roles]
    while names:
        name = names.pop()
        if name in seen or name == "make_barriers":
            continue
        seen.add(name)
        calls = [call for call in ast.walk(reader.functions[name]) if isinstance(call, ast.Call)]
        names += [
            call.func.id for call in calls if isinstance(call.func, ast.Name) and call.func.id in reader.functions
        ]
        for node in ast.walk(reader.functions[name]):
            for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
                if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                    simple = [at for at, child in enumerate(body) if isinstance(child, ast.Expr | ast.Assign)]
                    yield body, [at for at in simple if list(reader._block([body[at]], inside=name))]


def without(text: str, statement: ast.stmt) -> str:
    """The module without a statement."""
    lines = text.splitlines()
    assert statement.end_lineno is not None
    lines[statement.lineno - 1 : statement.end_lineno] = [" " * statement.col_offset + "pass"]
    return "\n".join(lines)


def swapped(text: str, first: ast.stmt, second: ast.stmt) -> str:
    """The module with two statements of one block in each other's place."""
    lines = text.splitlines()
    spans = [slice(node.lineno - 1, node.end_lineno) for node in (first, second)]
    lines[spans[1]], lines[spans[0]] = lines[spans[0]], lines[spans[1]]  # the later one first: lengths may differ
    return "\n".join(lines)


@pytest.mark.parametrize("stem", MUTATED)
def test_a_step_left_out_of_the_code_is_found(stem: str) -> None:
    left_out = [body[at] for body, places in statements(stem) for at in places]
    assert len(left_out) > 10
    for statement in left_out:
        assert differences(without(source(stem), statement), schedule(stem)), ast.unparse(statement)


@pytest.mark.parametrize("stem", MUTATED)
def test_steps_in_another_order_are_found(stem: str) -> None:
    reader, pairs = Reader(source(stem)), 0
    for body, places in statements(stem):
        for first, second in zip(places, places[1:], strict=False):
            one, other = body[first], body[second]
            if list(reader._block([one])) == list(reader._block([other])):
                continue  # the same step twice
            pairs += 1
            assert differences(swapped(source(stem), one, other), schedule(stem)), ast.unparse([one, other])
    assert pairs > 3


@pytest.mark.parametrize(
    ("stem", "old", "new"),
    [
        ("k6_d128", "if consumer == CONSUMERS - 1:", "if consumer == 0:"),
        ("k6_d128", "warpgroup.wait_group(1)", "warpgroup.wait_group(0)"),
        ("k6_d128", "accumulators, k_ring, v_ring,", "accumulators, v_ring, k_ring,"),
        ("k4_2_d64", "if warp_idx == 0:", "if warp_idx == 1:"),
        ("k2_cp_async_d64", "cp_async_wait_group(KV_STAGES - 1)", "cp_async_wait_group(KV_STAGES)"),
    ],
)
def test_another_ring_count_or_warp_is_found(stem: str, old: str, new: str) -> None:
    assert old in source(stem)
    assert differences(source(stem).replace(old, new, 1), schedule(stem))


# The data itself


@pytest.mark.parametrize("stem", STEMS)
def test_every_ring_is_filled_and_emptied(stem: str) -> None:
    """Where a ring has barriers, its producer waits and fills, and each consumer waits and gives back."""
    found = schedule(stem)
    for ring in found.rings:
        kinds = {(step.who, step.kind) for step in found.steps if step.on == ring.name}
        if ring.filled_by == "TMA":
            assert {(ring.producer, "load")} | {(who, "wait_full") for who in ring.consumers} <= kinds
            assert len(ring.sizes) == len(ring.holds)
        if ring.empty_arrivals:
            assert {(ring.producer, "wait_empty")} | {(who, "release") for who in ring.consumers} <= kinds
            by_lanes = ring.filled_by == "cp.async" or ring.producer in (K_CONVERTERS, V_CONVERTERS)
            lanes = 32 if ring.full_arrivals and by_lanes else 1  # of a warp that give it back
            assert ring.empty_arrivals == lanes * sum(found.role(who).warps for who in ring.consumers)
    assert sum(ring.mbarriers for ring in found.rings) * 8 == cta_of(variants()[stem].spec).barrier_bytes


@pytest.mark.parametrize("stem", STEMS)
def test_the_header_names_every_step(stem: str) -> None:
    """In order within a place, and each on one line; words that stand for several roles may come once."""
    text = " ".join(plans()[stem].header.timeline)
    numbers = [int(row.split()[0]) for row in plans()[stem].header.timeline if row.split()[0].isdigit()]
    assert numbers == list(range(1, len(numbers) + 1))
    for step in schedule(stem).steps:
        assert step.note in text
    for place, title in PLACE_TITLES.items():
        assert bool(title and f"{title}:" in text) == any(
            step.place == place for step in schedule(stem).steps if place != "kernel"
        )


def test_what_defines_a_file_is_in_its_header() -> None:
    causal, split = (" ".join(plans()[stem].header.timeline) for stem in ("fwd_d128_causal", "fwd_d64"))
    for said in ("wait q_empty, load Q", "draw", "S = Q K^T", "of the next tile's first step", "store LSE", "store O"):
        assert said in causal
    assert "add O" in split and "give O" in split and "draw" not in split
