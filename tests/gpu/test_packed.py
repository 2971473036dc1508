"""On a machine with a Hopper GPU: what modules for packed sequences, and pages, have to stand beside `fa3gen verify`.

Graphs that take the lengths of their replay, launches that run at the same time on streams and in graphs, and a soak of
random lengths.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import production
import pytest
import torch

import fa3gen
from fa3gen.compile.cache import cached_object
from fa3gen.design.workspace import Workspace
from fa3gen.spec.model import Forward
from fa3gen.spec.specfile import attention_among
from fa3gen.verify import packed_inputs, paged_inputs
from fa3gen.verify.inputs import served
from fa3gen.verify.packed_inputs import PackedCase, PackedInputs, drawn, sequences
from fa3gen.verify.packed_on_gpu import PackedRunner
from fa3gen.verify.paged_on_gpu import PagedRunner
from fa3gen.verify.reference import Attention
from fa3gen.verify.runner import DeviceLost

WORKSPACE = Workspace.find(Path(__file__).parent)
SPECS = {
    variant.stem: variant.spec
    for spec_file in WORKSPACE.load_all()
    for variant in attention_among(spec_file.variants)
    if variant.spec.problem.layout != "dense"
}
EVERY = pytest.mark.parametrize("stem", SPECS)
# The same rows, cut in as many ways as there are replays. More sequences than a warp looks at in one go.
ROWS, SEQUENCES, REPLAYS = (5000, 7000), 100, 8
SOAK_SECONDS, SOAK_SEED = 20, 23
LENGTHS = [
    ((700, 0, 1, 1500, 33), (900, 40, 1, 1500, 2000)),
    ((1, 64, 2000, 3), (4000, 64, 100, 0)),
    ((5,) * 70, (9,) * 70),
]


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch, hopper: Any) -> None:
    """And with nothing of the test before left in torch's allocator."""
    monkeypatch.chdir(WORKSPACE.root)
    torch.cuda.empty_cache()


def runner(stem: str, device: Any) -> PackedRunner:
    """What runs the committed module."""
    kind = PagedRunner if SPECS[stem].problem.layout == "paged" else PackedRunner
    return kind(fa3gen.load(stem), SPECS[stem], device, seed=1)


class Call:
    """One call whose sequences have all of the rows, so that all of O and LSE is written."""

    def __init__(self, stem: str, made: PackedInputs) -> None:
        self.module, self.spec, self.made = fa3gen.load(stem), SPECS[stem], made

    def attend(self) -> Attention:
        """On poisoned outputs; without an LSE output the result's LSE is empty."""
        out = torch.full_like(self.made.out, torch.nan)
        if not self.spec.outputs.lse:
            return Attention(
                self.module.attention(**self.made.given, **self.made.named, out=out),
                torch.empty(0, device=out.device),
            )
        return Attention(*self.module.attention(**self.made.given, **self.made.named, out=out, return_lse=True))


def make(spec: Forward, case: PackedCase, device: Any, **fields: Any) -> PackedInputs:
    """Inputs of a case as the module of a spec takes them; `fields` are those of pages."""
    case = served(case, spec)
    if spec.problem.layout == "packed":
        return packed_inputs.make(spec, case, device=device, seed=1)
    (paged,) = paged_inputs.in_pages([case], spec)
    return paged_inputs.make(spec, replace(paged, **fields), device=device, seed=1)


def made(spec: Forward, device: Any, lengths_q: Any, lengths_k: Any) -> PackedInputs:
    """Inputs of these lengths."""
    return make(spec, sequences("call", "", lengths_q, lengths_k, heads=(8, 2), layout="contiguous"), device)


@EVERY
def test_a_graph_takes_the_lengths_of_its_replay(stem: str, hopper: Any) -> None:
    """100 sequences of any lengths, none among them, from one capture."""
    spec, draw = SPECS[stem], random.Random(1)

    def cut(**used: Any) -> PackedInputs:
        case = replace(drawn(draw, rows=0, total=ROWS, count=SEQUENCES), **used)
        return make(spec, case, hopper, filled=True)  # the pages of one are not those of another

    captured = cut(used_q=(ROWS[0],) * SEQUENCES, used_k=(ROWS[1],) * SEQUENCES)  # more than there are: all
    wrong = runner(stem, hopper).wrong_replays(captured, [cut() for _ in range(REPLAYS)])
    assert not wrong, wrong


@EVERY
@pytest.mark.parametrize(
    "how",
    [production.streams_at_once, production.graphs_at_once, production.graphs_beside_streams],
    ids=["streams", "graphs", "both"],
)
def test_launches_at_the_same_time_do_not_disturb_each_other(stem: str, how: Any, hopper: Any) -> None:
    calls: Any = [Call(stem, made(SPECS[stem], hopper, *lengths)) for lengths in (*LENGTHS, LENGTHS[0])]
    wrong = list(production.undisturbed(calls, how(hopper, times=3, launches=8)))
    assert not wrong, "\n".join(wrong)


def test_soak(hopper: Any) -> None:
    """Random lengths, every module in turn, with the criteria of `fa3gen verify`."""
    for stem in SPECS:  # outside the time: compiling takes longer than the soak
        cached_object(WORKSPACE.module_path(stem))
    draw, end, failures, calls = random.Random(SOAK_SEED), time.monotonic() + SOAK_SECONDS, [], 0
    while time.monotonic() < end:
        for stem in SPECS:
            case = drawn(draw, rows=draw.choice((200, 900)))
            if SPECS[stem].problem.layout == "paged":
                (case,) = paged_inputs.in_pages([case], SPECS[stem])
            try:
                result = runner(stem, hopper).run_case(case)
            except DeviceLost as lost:
                pytest.exit(f"{stem} left the GPU unusable on {case.shape}: {lost}", returncode=1)
            failures += [f"{stem}: {case}: {failure}" for failure in result.failures]
            calls += 1
    assert not failures, "\n".join(failures[:5])
    assert calls >= len(SPECS)
