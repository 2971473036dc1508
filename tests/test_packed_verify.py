"""verify of modules for packed sequences, on modules in plain PyTorch: a right one, and one wrong in each of many ways.

Both criteria judge them: those of a GPU, and those of the CPU model.
"""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rendering import changed
from torch_modules import PackedModule, check_arguments, check_scores

from fa3gen.design.masks import reach
from fa3gen.spec.model import CausalMask, Forward, Mask, NoMask, WindowMask
from fa3gen.verify import packed_inputs, reference
from fa3gen.verify.attention_on_gpu import block_norms, wrote_outside
from fa3gen.verify.inputs import served
from fa3gen.verify.on_cpu import CpuReport, verify_on_cpu
from fa3gen.verify.on_gpu import Report, verify_module
from fa3gen.verify.on_model import CPU
from fa3gen.verify.packed_inputs import PackedInputs, Span, cpu_cases, drawn, gpu_cases, sequences, spans
from fa3gen.verify.packed_on_gpu import PackedRunner
from fa3gen.verify.reference import Attention

torch.set_num_threads(1)  # the workers of xdist share the cores
CAUSAL = CausalMask()
MASKS = [NoMask(), CAUSAL, WindowMask(left=50, right=10)]
NOT_TRIED = [
    "runs on the current stream",
    "allocates only its outputs",
    "a graph takes the lengths of its replay",
    "two graphs run at once",
]


def spec_of(mask: Mask = CAUSAL, **fields: Any) -> Forward:
    """A packed spec of head dim 64; nothing of it but shapes of tiles matters here."""
    spec = changed("fwd_d64", **fields).spec
    assert isinstance(spec, Forward)
    return spec.model_copy(update={"mask": mask, "problem": spec.problem.model_copy(update={"layout": "packed"})})


def on_cpu(module: PackedModule, count: int = 1) -> CpuReport:
    return verify_on_cpu(module, spec_of(module.mask), seed=7, count=count)


def on_gpu(module: PackedModule) -> Report:
    """With the criteria of a GPU, on the few small cases."""
    spec = spec_of(module.mask)
    return verify_module(module, spec, CPU, cases=cpu_cases(spec), seed=7)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_right_module_passes_everything_that_can_be_tried_on_a_cpu(mask: Mask) -> None:
    for report in (on_cpu(PackedModule(mask), count=2), on_gpu(PackedModule(mask))):
        assert report.failures == () and report.passed
        assert [check.name for check in report.checks if check.passed is None] == NOT_TRIED


# -- modules that are wrong in one way


class WholeTiles(PackedModule):
    """O of whole tiles of 8 rows: garbage behind the end of a sequence, where the next one begins."""

    def store(self, out: torch.Tensor, lse: torch.Tensor, rows: Span, result: Attention) -> None:
        super().store(out, lse, rows, result)
        out[rows[1] : rows[1] + -(rows[1] - rows[0]) % 8] = math.nan


class OneRowMore(PackedModule):
    """A last row too many, only in LSE."""

    def store(self, out: torch.Tensor, lse: torch.Tensor, rows: Span, result: Attention) -> None:
        super().store(out, lse, rows, result)
        lse[:, rows[1] : rows[1] + 1] = 0


class NeighboursV(PackedModule):
    """P = 0 for the key behind the last, and 0 times what lies there."""

    def attend(self, given: Any, rows: Span, keys: Span, scale: Any) -> Attention:
        out, lse = super().attend(given, rows, keys, scale)
        beyond = given[2][keys[1] : keys[1] + 1].float().nan_to_num(math.nan, math.nan, math.nan)
        return Attention(out + 0 * beyond.sum(), lse)


class NeighboursK(PackedModule):
    """A key of the next sequence is seen."""

    def attend(self, given: Any, rows: Span, keys: Span, scale: Any) -> Attention:
        return super().attend(given, rows, (keys[0], min(keys[1] + 1, len(given[1]))), scale)


class NextLse(PackedModule):
    """LSE one row later."""

    def store(self, out: torch.Tensor, lse: torch.Tensor, rows: Span, result: Attention) -> None:
        super().store(out, lse, rows, result)
        lse[:, slice(*rows)] = result.lse[0].roll(1, 1)


class SkipsAGroup(PackedModule):
    """Sequences 32 to 63 are not found."""

    def sequence(self, number: int, *others: Any) -> None:
        if not 32 <= number < 64:
            super().sequence(number, *others)


class TwoGroups(PackedModule):
    """Only the first 64 sequences are found."""

    def sequence(self, number: int, *others: Any) -> None:
        if number < 64:
            super().sequence(number, *others)


class IgnoresUsed(PackedModule):
    """All rows between the offsets are taken as used."""

    def spans(self, offsets: torch.Tensor, used: torch.Tensor | None, total: int) -> list[Span]:
        return super().spans(offsets, None, total)


class OneBegin(PackedModule):
    """Keys begin where queries do."""

    def attend(self, given: Any, rows: Span, keys: Span, scale: Any) -> Attention:
        begin = min(rows[0], len(given[1]) - keys[1] + keys[0])
        return super().attend(given, rows, (begin, begin + keys[1] - keys[0]), scale)


class WholeDiagonal(PackedModule):
    """The diagonal is that of the whole tensors, not of the sequence."""

    def attend(self, given: Any, rows: Span, keys: Span, scale: Any) -> Attention:
        q, k, v = given
        further = len(k) - len(q) - (keys[1] - keys[0] - rows[1] + rows[0])
        part = q[None, slice(*rows)], k[None, slice(*keys)], v[None, slice(*keys)]
        return reference.attention(*part, scale=scale, reach=(None, further), compute_dtype=torch.float32)


class TopLeft(PackedModule):
    """The diagonal begins in the top left corner."""

    def attend(self, given: Any, rows: Span, keys: Span, scale: Any) -> Attention:
        q, k, v = given
        part = q[None, slice(*rows)], k[None, slice(*keys)], v[None, slice(*keys)]
        right = rows[1] - rows[0] - keys[1] + keys[0]
        return reference.attention(*part, scale=scale, reach=(None, right), compute_dtype=torch.float32)


class Unclamped(PackedModule):
    """An end before its begin is taken from the end of the tensor, as Python does, and no length is too large."""

    def spans(self, offsets: torch.Tensor, used: torch.Tensor | None, total: int) -> list[Span]:
        found = [slice(*pair).indices(total)[:2] for pair in zip(offsets.tolist(), offsets[1:].tolist(), strict=False)]
        if used is None:
            return [(begin, max(begin, end)) for begin, end in found]
        return [
            (begin, min(total, begin + max(0, rows))) for (begin, _), rows in zip(found, used.tolist(), strict=True)
        ]


class LseByRow(PackedModule):
    """LSE (total_q, heads)."""

    def attention(self, *arguments: Any, return_lse: bool = False, **keywords: Any) -> Any:
        out, lse = super().attention(*arguments, return_lse=True, **keywords)
        return (out, lse.t().contiguous()) if return_lse else out


class ZeroesOut(PackedModule):
    """All of `out` is 0 before anything is written."""

    def attention(self, *arguments: Any, out: Any = None, **keywords: Any) -> Any:
        return super().attention(*arguments, out=out if out is None else out.zero_(), **keywords)


# By what is wrong: the module, a case that has to see it, and what is said.
WRONG: dict[str, tuple[type[PackedModule], str, str]] = {
    "O written beyond a sequence": (WholeTiles, "ragged", "wrote outside `out`"),
    "LSE written beyond a sequence": (OneRowMore, "few_keys", "wrote rows of LSE that are not used"),
    "V of a neighbour": (NeighboursV, "ragged", "O has NaN"),
    "a key of a neighbour": (NeighboursK, "used", "O is off by"),
    "LSE a row off": (NextLse, "tile_edge", "LSE is "),
    "a group of sequences skipped": (SkipsAGroup, "many", "O has NaN"),
    "the third group not looked at": (TwoGroups, "many", "O has NaN"),
    "lengths in use ignored": (IgnoresUsed, "used", "O is off by"),
    "keys begin where queries do": (OneBegin, "ragged", "O "),
    "diagonal of the whole tensor": (WholeDiagonal, "ragged", "O is off by"),
    "diagonal from the top left": (TopLeft, "tile_edge", "O is off by"),
    "offsets not clamped": (Unclamped, "lying", "wrote outside `out`"),
    "LSE of another shape": (LseByRow, "ragged", "LSE is (211, 1) torch.float32; it should be (1, 211)"),
    "rows of no sequence written": (ZeroesOut, "ragged", "wrote outside `out`"),
}  # fmt: skip


# What stands in LSE where a GPU's call writes nothing is known only if its memory is a block that was poisoned before.
ONLY_ON_THE_MODEL = "LSE written beyond a sequence"


@pytest.mark.parametrize("what", WRONG)
def test_a_module_that_is_wrong_in_one_way_fails(what: str) -> None:
    kind, case_name, message = WRONG[what]
    spec = spec_of()
    (case,) = (case for case in cpu_cases(spec) if case.name == case_name)
    (on_model,) = verify_on_cpu(kind(CAUSAL), spec, seed=7, count=1, cases=[case]).cases
    assert any(message in failure for failure in on_model.failures), on_model
    (by_yardstick,) = verify_module(kind(CAUSAL), spec, CPU, seed=7, cases=[case]).cases
    if what != ONLY_ON_THE_MODEL:
        assert any(message in failure for failure in by_yardstick.failures), by_yardstick


def test_every_wrong_module_fails_as_a_whole() -> None:
    """Whatever the case that it was written for."""
    for kind, _, _ in WRONG.values():
        assert not on_cpu(kind(CAUSAL)).passed


# -- sinks and capped scores


class Scored(PackedModule):
    """With sinks and a cap, one of which it may forget."""

    forget = ""

    def attention(self, *tensors: Any, sinks: Any = None, softcap: Any = None, **keywords: Any) -> Any:
        self.scores = {"sinks": sinks, "softcap": softcap}
        return super().attention(*tensors, **keywords)

    def check(self, tensors: dict[str, Any]) -> None:
        super().check(tensors)
        check_scores(tensors["q"], **self.scores)

    def attend(self, given: Any, rows: Span, keys: Span, scale: Any) -> Attention:
        q, k, v = given
        part = q[None, slice(*rows)], k[None, slice(*keys)], v[None, slice(*keys)]
        facts = {"scale": scale, "reach": reach(self.mask), "compute_dtype": torch.float32}
        return reference.attention(*part, **facts, **{**self.scores, **({self.forget: None} if self.forget else {})})


class NoSinkWithoutKeys(Scored):
    """The sink is added after the last key, and a sequence without keys has no last key."""

    def sequence(self, number: int, given: Any, rows: Span, keys: Span, scale: Any, out: Any, lse: Any) -> None:
        super().sequence(number, given, rows, keys, scale, out, lse)
        if keys[0] == keys[1]:
            lse[:, slice(*rows)] = -math.inf


def scored(module: Scored, cases: Any = None) -> Report:
    """By the criteria of a GPU."""
    spec = spec_of(module.mask, softmax={"sink": True, "softcap": True})
    return verify_module(module, spec, CPU, cases=cpu_cases(spec) if cases is None else cases, seed=7)


def test_a_module_with_sinks_and_a_cap() -> None:
    spec = spec_of(softmax={"sink": True, "softcap": True})
    names = {case.name for case in cpu_cases(spec)} - {case.name for case in cpu_cases(spec_of())}
    assert names == {"sinks", "sinks_16_bits", "capped", "capped_64", "capped_low"}
    large = {case.name for case in gpu_cases(spec)} - names - {case.name for case in gpu_cases(spec_of())}
    assert large == {"sinks_16_bits_large", *(f"capped{cap}_large" for cap in ("", "_50", "_64", "_low"))}
    assert scored(Scored(CAUSAL)).failures == ()
    assert scored(Scored(CAUSAL), [case for case in gpu_cases(spec) if case.name in large]).failures == ()
    assert verify_on_cpu(Scored(CAUSAL), spec, seed=7, count=1, cases=[]).failures == ()


@pytest.mark.parametrize(
    ("forget", "cases"), [("sinks", {"sinks", "sinks_16_bits", "decode"}), ("softcap", {"capped", "capped_low"})]
)
def test_forgotten_sinks_and_caps_fail(forget: str, cases: set[str]) -> None:
    module = Scored(CAUSAL)
    module.forget = forget
    failed = {case.name for case in scored(module).cases if case.failures}
    assert failed >= cases


def test_a_sink_of_a_sequence_without_keys() -> None:
    report = scored(NoSinkWithoutKeys(CAUSAL))
    assert {"ragged", "sinks"} <= {case.name for case in report.cases if case.failures}
    assert any("empty batch: no keys: O is not 0, or LSE not -inf" in failure for failure in report.failures)


def failing_checks(module: PackedModule) -> dict[str, str]:
    report = verify_on_cpu(module, spec_of(module.mask), seed=7, count=1, cases=[])
    return {check.name: check.detail for check in report.checks if check.passed is False}


class ChecksNothing(PackedModule):
    def check(self, tensors: dict[str, Any]) -> None:
        pass


class ChecksTheRestOnly(PackedModule):
    """Offsets and lengths of any dtype, device and size."""

    def check(self, tensors: dict[str, Any]) -> None:
        check_arguments(*list(tensors.values())[:4], dtype=self.dtype, head_dim=self.head_dim, modes=3)


def test_missing_argument_checks_fail() -> None:
    detail = failing_checks(ChecksNothing(CAUSAL))["bad arguments are refused"]
    for what in ("float32 q", "v whose last mode is not contiguous", "fewer keys in v than in k"):
        assert f"{what}: " in detail
    detail = failing_checks(ChecksTheRestOnly(CAUSAL))["bad arguments are refused"]
    for what in ("int64 offsets", "offsets with gaps between them", "no offset at all"):
        assert f"{what}: accepted" in detail
    for name in ("seqused_q", "seqused_k"):
        assert f"{name} of another size: accepted" in detail and f"int64 {name}: accepted" in detail
        assert f"{name} on meta: " in detail
    assert "float32 q" not in detail


class NeedsKeys(PackedModule):
    """Rows of sequences without keys are left as they are."""

    def sequence(self, number: int, given: Any, rows: Span, keys: Span, *others: Any) -> None:
        if keys[0] < keys[1]:
            super().sequence(number, given, rows, keys, *others)


class NeedsSequences(PackedModule):
    def check(self, tensors: dict[str, Any]) -> None:
        super().check(tensors)
        if len(tensors["cu_seqlens_q"]) < 2:
            raise ValueError("cu_seqlens_q names no sequence")


def test_calls_of_nothing_that_fail_are_seen() -> None:
    assert "no keys: O is not 0, or LSE not -inf" in failing_checks(NeedsKeys(CAUSAL))["empty batch"]
    assert failing_checks(NeedsSequences(CAUSAL)) == {
        "empty batch": "raised ValueError: cu_seqlens_q names no sequence"
    }


# -- inputs


def test_spans_are_what_is_left_inside_of_the_tensor() -> None:
    assert spans((0, 3, 3, 9), None, 9) == [(0, 3), (3, 3), (3, 9)]
    assert spans((2, 5, 9), (1, 7), 12) == [(2, 3), (5, 9)]
    assert spans((-4, 5, 2, 99), None, 7) == [(0, 5), (5, 5), (2, 7)]
    assert spans((8, 9, -(2**31), 3), (2**31 - 1, -1, 2), 7) == [(7, 7), (7, 7), (0, 2)]


@pytest.mark.parametrize("stem", ["fwd_d64", "fwd_d192_causal", "fwd_d128_pack4_causal", "fwd_d128_window"])
def test_the_cases_cover_what_they_must(stem: str) -> None:
    spec = changed(stem).spec
    assert isinstance(spec, Forward)
    m, n = spec.tile.q // spec.tile.pack_heads, spec.tile.kv
    cases = {case.name: case for case in cpu_cases(spec)}
    every = gpu_cases(spec)
    assert all(case.why for case in every) and len({case.name for case in every}) == len(every)
    lengths = {case.name: [(q[1] - q[0], k[1] - k[0]) for q, k in case.spans] for case in every}
    ragged = lengths["ragged"]
    assert {(q > 0, k > 0) for q, k in ragged} == {(True, True), (True, False), (False, True), (False, False)}
    assert cases["ragged"].offsets_q[0] > 0 and cases["ragged"].seq_q > cases["ragged"].offsets_q[-1]
    assert any(q > k > 0 for q, k in lengths["few_keys"])
    assert not any(q for q, _ in lengths["no_rows"]) and cases["no_rows"].seq_q > 0
    assert {q for q, _ in lengths["tile_edge"]} >= {m, m + 1} and {k for _, k in lengths["tile_edge"]} >= {n, n + 1}
    groups = {number // 32 for number, (q, _) in enumerate(lengths["many"]) if q}
    assert groups == {0, 1, 2} and len(lengths["many"]) > 64
    assert {q for q, _ in lengths["decode"]} == {1} and cases["decode"].heads_q > cases["decode"].heads_kv > 1
    assert lengths["wrap"][0][1] > 2 * spec.load.kv_stages * n
    assert {case.layout for case in cases.values()} >= {"padded", "transposed", "packed", "odd_strides"}
    assert {case.unused for case in cases.values()} == {"nan", "large"}
    assert len(lengths["chats"]) >= 1000 and len(lengths["decode_many"]) > 132
    assert sum(q for q, _ in lengths["total_64k"]) == 65536
    assert cases["lying"].used_q and max(cases["lying"].offsets_q) == 2**31 - 1
    assert (len(lengths.get("window", ())) == 2) == isinstance(spec.mask, WindowMask)


@pytest.mark.parametrize("unused", ["nan", "large"])
def test_what_no_sequence_uses_is_spoiled_and_nothing_else(unused: Any) -> None:
    case = sequences("x", "", (3, 5), (4, 2), first=2, behind=3, used_q=(3, 2), used_k=(1, 2), unused=unused)
    made = packed_inputs.make(spec_of(), case, device=CPU, seed=1)
    assert made.spans == (((2, 5), (2, 3)), ((5, 7), (6, 8)))
    assert made.given["cu_seqlens_q"].tolist() == [2, 5, 10] and made.given["seqused_k"].tolist() == [1, 2]
    for tensor, used in ((made.q, [2, 3, 4, 5, 6]), (made.k, [2, 6, 7]), (made.v, [2, 6, 7])):
        rows = torch.zeros(len(tensor), dtype=torch.bool)
        rows[used] = True
        wild = ~tensor.isfinite().all(-1).all(-1) if unused == "nan" else tensor.abs().amax((1, 2)) > 10
        assert torch.equal(wild, ~rows)
        if unused == "nan":
            assert tensor.isnan().any() and tensor.isinf().any()
    assert [part.shape for part in made.written] == [(3, 1, 64), (2, 1, 64)]
    assert made.lengths == [3, 2] and made.place(0, 3) == "sequence 1, row 0"
    assert made.rows_of(made.q).shape == (1, 5, 1, 64) and torch.isfinite(made.rows_of(made.q)).all()
    lse = torch.arange(13.0)[None]
    assert made.rows_of_lse(lse).tolist() == [[[2, 3, 4, 5, 6]]]
    assert made.unwritten_lse(lse).tolist() == [[0, 1, 7, 8, 9, 10, 11, 12]]
    lse[:, 8] = math.nan
    assert wrote_outside(made, lse) == ("wrote rows of LSE that are not used",)
    made.out_storage.view(torch.int16)[0, 20] = 0x7FC0  # another NaN
    assert wrote_outside(made, None) == ("wrote outside `out`, or rows that are not used",)


def test_slices_of_one_tensor_have_its_strides() -> None:
    (case,) = (case for case in cpu_cases(spec_of()) if case.layout == "packed")
    made = packed_inputs.make(spec_of(), case, device=CPU, seed=1)
    assert {x.untyped_storage().data_ptr() for x in (made.q, made.k, made.v)} == {made.q.untyped_storage().data_ptr()}
    assert made.q.stride() == (3 * 64, 64, 1)


def test_a_block_has_rows_of_one_part() -> None:
    """A short row of 2 beside many of 1000 would be nothing."""
    values = torch.full((1, 70, 1, 1), 1000.0)
    values[:, 66] = 2
    assert block_norms(values, [70]).flatten().tolist() == pytest.approx([8000, math.sqrt(5e6 + 4)])
    assert block_norms(values, [66, 1, 3])[0, 2].item() == 2


# -- random cases, and graphs


def test_random_cases_are_of_every_kind_and_pass() -> None:
    draw = random.Random(1)
    cases = [served(drawn(draw, rows=90), spec_of()) for _ in range(30)]
    report = verify_on_cpu(PackedModule(CAUSAL), spec_of(), cases=cases, seed=1, count=1)
    assert report.failures == ()
    assert {case.layout for case in cases} == {"padded", "contiguous", "transposed"}
    assert {case.used_k is None for case in cases} == {case.offsets_q[0] > 0 for case in cases} == {True, False}
    assert {case.unused for case in cases} == {"nan", "large"} and {len(case.offsets_q) for case in cases} >= {2, 101}
    lengths = [(q[1] - q[0], k[1] - k[0]) for case in cases for q, k in case.spans]
    assert {(q > 0, k > 0, q > k) for q, k in lengths} >= {(True, True, True), (True, True, False), (True, False, True)}
    some = [case for case in cases if case.used_k is not None][:4]
    wrong = verify_on_cpu(IgnoresUsed(CAUSAL), spec_of(), cases=some, seed=1, count=1)
    assert any(case.failures for case in wrong.cases)


class Replayed(PackedRunner):
    """Without a GPU: a graph that calls again."""

    def _captured(self, made: PackedInputs) -> Any:
        self.entry(**made.given, out=made.out)
        return SimpleNamespace(replay=lambda: self.entry(**made.given, out=made.out))


class LengthsOfTheFirstCall(PackedModule):
    """Lengths are read on the host, when the graph is captured."""

    def spans(self, offsets: torch.Tensor, used: torch.Tensor | None, total: int) -> list[Span]:
        known = self.__dict__.setdefault("known", {})
        return known.setdefault((total, offsets.data_ptr()), super().spans(offsets, used, total))  # type: ignore[no-any-return]


def test_a_graph_has_to_take_the_lengths_of_its_replay() -> None:
    assert Replayed(PackedModule(CAUSAL), spec_of(), CPU, 1)._graph_of_other_lengths() == ""
    assert "O is off by" in Replayed(LengthsOfTheFirstCall(CAUSAL), spec_of(), CPU, 1)._graph_of_other_lengths()
    draw = random.Random(2)
    cut = [drawn(draw, rows=0, total=(150, 190), count=7) for _ in range(5)]
    assert all(case.offsets_q[-1] == 150 and case.offsets_k[-1] == 190 and len(case.offsets_q) == 8 for case in cut)
    assert all(case.used_q is not None and case.used_k is not None for case in cut)
