"""Every form of a WGMMA's operands with every swizzle, in kernels of the K4 kind: rendered, and a sample executed."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rendering import CHECKOUT, changed

from fa3gen.compile import compiler
from fa3gen.compile.cache import cached_compile
from fa3gen.compile.census import compare
from fa3gen.cpu.module import load_on_cpu
from fa3gen.design import rules
from fa3gen.generate.plan import make_plan
from fa3gen.generate.render import render_variant
from fa3gen.spec.specfile import Variant
from fa3gen.verify.attention_on_cpu import CpuRunner
from fa3gen.verify.inputs import Case

torch.set_num_threads(1)  # the workers of xdist share the cores
SWIZZLES = ("none", "32B", "64B", "128B")
A_FORMS = (("smem", "k"), ("smem", "mn"), ("registers", "k"))
MAJORS = ("k", "mn")
SEED = 3


class Form(NamedTuple):
    """How both products read their operands, and the swizzles of Q, K, V and, in shared memory, P."""

    q: tuple[str, str]
    k: str
    p: tuple[str, str]
    v: str
    swizzles: tuple[str, str, str, str]

    @property
    def name(self) -> str:
        """`q_smem_mn_k_k_p_registers_k_v_mn_32B_64B_none`."""
        return "_".join(["q", *self.q, "k", self.k, "p", *self.p, "v", self.v, *self.swizzles])

    @property
    def variant(self) -> Variant:
        """K4.2 or K4 through shared memory in this form; a tile of 128 keys where Q and P would be alike otherwise."""
        q, k, v, p = self.swizzles
        apart = 128 if self.q[0] == self.p[0] == "registers" else 64
        handoff: dict[str, Any] = {"through": "registers"}
        if self.p[0] == "smem":
            handoff = {"through": "smem_16bit", "swizzle": p}
        return changed(
            "k4_2_d64",
            tile={"q": 64, "kv": apart, "warpgroups": 1},
            smem={"q": q, "k": k, "v": v},
            qk={"a": {"source": self.q[0], "major": self.q[1]}, "b": {"source": "smem", "major": self.k}},
            pv={"a": {"source": self.p[0], "major": self.p[1]}, "b": {"source": "smem", "major": self.v}},
            handoff=handoff,
        )


def sample() -> Iterator[Form]:
    """Twelve, in which each operand in each of its majors, and Q in registers, meets each swizzle."""
    for i in range(12):
        in_smem = i < 8
        p = ("smem", MAJORS[i % 2]) if in_smem else ("registers", "k")
        v = MAJORS[i // 4 % 2] if in_smem else MAJORS[i % 2]
        swizzles = SWIZZLES[i // 3], SWIZZLES[i // 2 % 4], SWIZZLES[i % 4], SWIZZLES[i // 2 % 4]
        yield Form(A_FORMS[i % 3], MAJORS[i % 2], p, v, swizzles)


SAMPLE = tuple(sample())


def test_the_sample_has_each_form_and_each_swizzle() -> None:
    assert {(form.q, form.k) for form in SAMPLE} == set(itertools.product(A_FORMS, MAJORS))
    assert {(form.p, form.v) for form in SAMPLE} == set(itertools.product(A_FORMS, MAJORS))
    for met, forms in (
        ({(form.q, form.swizzles[0]) for form in SAMPLE}, A_FORMS),
        ({(form.k, form.swizzles[1]) for form in SAMPLE}, MAJORS),
        ({(form.v, form.swizzles[2]) for form in SAMPLE}, MAJORS),
        ({(form.p[1], form.swizzles[3]) for form in SAMPLE if form.p[0] == "smem"}, MAJORS),
    ):
        assert met == set(itertools.product(forms, SWIZZLES))


@pytest.mark.parametrize("form", SAMPLE, ids=lambda form: form.name)
def test_forms_on_the_cpu_model(form: Form, tmp_path: Path) -> None:
    """Two tiles of queries, and keys that wrap the ring, the last of each cut short; and what the compiler makes."""
    variant, path = form.variant, tmp_path / f"{form.name}.py"
    path.write_text(render_variant(variant, CHECKOUT))
    found = CpuRunner(load_on_cpu(path), variant.spec, SEED, 1)  # type: ignore[arg-type]
    result = found.run_case(Case("ragged", "", 1, 64 + 13, 2 * variant.spec.tile.kv + 9, 2, 1))  # type: ignore[union-attr]
    assert result.failures == ()
    census = compiler.analyse(cached_compile(path)).census
    assert compare(census, make_plan(variant).expectation) == []


def test_every_form_is_rendered_with_every_swizzle() -> None:
    """All 6 x 6, each with one swizzle for all operands, in turn, are legal and valid Python; all four have a plan."""
    swizzles = itertools.cycle(SWIZZLES)
    for q, k, p, v in itertools.product(A_FORMS, MAJORS, A_FORMS, MAJORS):
        for swizzle in SWIZZLES:
            variant = Form(q, k, p, v, (swizzle,) * 4).variant
            assert rules.check(variant.spec) == [] and make_plan(variant)
        ast.parse(render_variant(Form(q, k, p, v, (next(swizzles),) * 4).variant, CHECKOUT))
