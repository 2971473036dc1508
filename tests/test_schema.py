"""The JSON Schema accepts what fa3gen accepts, and catches what an editor can know to be wrong."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from fa3gen.design.workspace import Workspace, bundled_data
from fa3gen.spec.schema import file_schema

SCHEMA = file_schema()


def errors(text: str) -> list[str]:
    document: Any = YAML(typ="safe").load(text)
    return [error.message for error in Draft202012Validator(SCHEMA).iter_errors(document)]


def test_the_schema_is_a_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)


def test_every_spec_of_the_package_is_valid() -> None:
    files = Workspace(bundled_data(), bundled_data()).spec_files()
    assert files
    for path in files:
        assert errors(path.read_text(encoding="utf-8")) == [], path


@pytest.mark.parametrize(
    "text",
    [
        "summary: x",
        "{summary: x, extends: base, load: {kv_stages: 3}}",
        "{summary: x, extends: base, tile: {kv: 64, warpgroups: null, threads: 256}}",
        "{summary: x, extends: base, smem: null}",
        "{summary: x, mask: causal}",
        "{summary: x, mask: {kind: window, left: 512, right: 0}}",
        "{summary: x, mask: {left: 128}}",
        "{summary: x, handoff: {through: smem_16bit, swizzle: 64B}}",
        "{summary: x, matrix: {}}",
        "{summary: x, matrix: {problem.head_dim: [64, 128], mask: [none, causal, {kind: window, left: 1, right: 0}]}}",
        "{summary: x, matrix: {load.kv_stages: [1, 2], qk.a.major: [k], outputs.lse: [true, false], smem.k: [64B]}}",
        "{summary: x, schedule: {kind: ping_pong, overlap: true}}",
        "{summary: x, matrix: {schedule.overlap: [true, false], schedule: [{kind: cooperative}]}}",
        "{summary: x, matrix: {problem.head_dim: [128, {value: 64, with: {tile: {q: 192}, mask: causal}}]}}",
        "{summary: x, matrix: {mask: [none, {value: causal, with: {schedule: {overlap: false}}}]}}",
        "{summary: x, matrix: {mask.left: [1], load: [{engine: sync}], handoff.swizzle: [32B]}}",
    ],
)
def test_valid(text: str) -> None:
    assert errors(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "{extends: base}",
        "{summary: ''}",
        "{summary: x, sumary: y}",
        "{summary: x, extends: 3}",
        "{summary: x, load: {depth: 3}}",
        "{summary: x, load: {engine: cp_async, barrier: shared}}",
        "{summary: x, load: {engine: bulk}}",
        "{summary: x, handoff: {through: registers, swizzle: 128B}}",
        "{summary: x, mask: diagonal}",
        "{summary: x, problem: {head_dim: 0}}",
        "{summary: x, problem: {head_dim: '64'}}",
        "{summary: x, outputs: {lse: 'no'}}",
        "{summary: x, schedule: {kind: ping_pong, overlap: 1}}",
        "{summary: x, schedule: {kind: cooperative, overlap: true}}",
        "{summary: x, matrix: {problem.head_dim: [{value: 64}]}}",
        "{summary: x, matrix: {problem.head_dim: [{value: '64', with: {tile: {q: 192}}}]}}",
        "{summary: x, matrix: {problem.head_dim: [{value: 64, with: {}}]}}",
        "{summary: x, matrix: {problem.head_dim: [{value: 64, with: {tille: {q: 192}}}]}}",
        "{summary: x, matrix: {problem.head_dim: []}}",
        "{summary: x, matrix: {problem.head_dim: 64}}",
        "{summary: x, matrix: {problem.head_dim: [64, 64]}}",
        "{summary: x, matrix: {problem.headdim: [64]}}",
        "{summary: x, matrix: {summary: [a, b]}}",
    ],
)
def test_invalid(text: str) -> None:
    assert errors(text) != []
