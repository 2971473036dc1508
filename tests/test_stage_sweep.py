"""The stage sweep: its specs, copies that hold CTAs down, its record, the tables made of it. None needs a GPU."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from rendering import CHECKOUT, ROOT

from fa3gen.base.errors import UserError
from fa3gen.compile.census import Loop
from fa3gen.compile.one_bank import OneBank, one_bank_of
from fa3gen.design import ceiling, footprint
from fa3gen.design.workspace import Workspace
from fa3gen.generate.render import render_variant
from fa3gen.inspect.ladder_page import LadderError, block
from fa3gen.inspect.stage_sweep import simulated
from fa3gen.records import stage_sweep
from fa3gen.records.stage_sweep import Measured, StageSweep

VARIANTS = {variant.stem: variant for variant in stage_sweep.variants(CHECKOUT)}
FAST = Measured(
    stem="k3_stages_d64_threads128_kv_stages2",
    held=False,
    registers=168,
    ctas=3,
    tflops={"4096": 27.64, "16384": 27.4},
    sm_mhz={"4096": 1830.0},
)
HELD = FAST.model_copy(update={"held": True, "ctas": 1, "tflops": {"4096": 18.9}})
SWEEP = StageSweep(gpu="a GPU", date="2026-01-02", timed="somehow", torch=None, dsl=None, measured=[FAST, HELD])


def turn(ffma: int, one_bank: int) -> Loop:
    """A loop of a product on scalars."""
    counts = {"instructions": 2 * ffma, "gmma": 0, "ex2": 0}
    return Loop(ffma, depth=2, innermost=True, waits=False, ffma=ffma, one_bank=one_bank, **counts)


TURNS = SimpleNamespace(loops=[turn(128, 47), turn(64, 6)])


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script that measures."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "gpu")
    monkeypatch.delitem(sys.modules, "stage_sweep", raising=False)
    import stage_sweep as probe

    yield probe
    monkeypatch.delitem(sys.modules, "stage_sweep", raising=False)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """One with the specs of the sweep and a record."""
    (tmp_path / "generated").mkdir()
    (tmp_path / "specs").symlink_to(ROOT / "specs")
    found = Workspace(tmp_path, ROOT)
    stage_sweep.write(found, SWEEP)
    return found


def test_the_sweep_is_what_it_is_said_to_be() -> None:
    """K3 with 128 and 256 threads, K4.2, and three kernels of one warpgroup with one barrier; 1, 2, 3 and 5 stages."""
    facts = {
        (variant.source.stem, spec.problem.head_dim, footprint.threads(spec), spec.tile.q, footprint.kv_stages(spec))
        for variant in VARIANTS.values()
        for spec in [variant.spec]
    }
    kernels = {("k3_stages", 128, 64), ("k3_stages", 256, 64), ("k4_2_stages", 256, 128)}
    kernels |= {(f"{rung}_small", 128, 64) for rung in ("k4_1", "k4_smem", "k4_2")}
    wanted = {
        (name, d, threads, q, stages) for name, threads, q in kernels for d in (64, 128) for stages in (1, 2, 3, 5)
    }
    assert facts == wanted and len(VARIANTS) == 48
    small = [variant.spec for variant in VARIANTS.values() if variant.source.stem.endswith("_small")]
    assert {(spec.tile.warpgroups, spec.tile.kv, spec.load.barrier) for spec in small} == {(1, 64, "shared")}


@pytest.mark.parametrize("ctas", [1, 2])
def test_a_copy_leaves_room_for_so_many_ctas_and_no_more(probe: ModuleType, ctas: int) -> None:
    for variant in VARIANTS.values():
        regions, barriers = footprint.shared_memory_map(variant.spec), footprint.barrier_bytes(variant.spec)
        total, unused = footprint.total_bytes(regions, barriers), probe.unused_bytes(variant, ctas)

        def fit(size: int) -> int:
            return ceiling.SMEM_PER_SM // (size + ceiling.SMEM_RESERVED)

        assert (unused > 0) == (fit(total) > ctas)
        if unused > 0:
            assert fit(total + unused) == ctas and unused % 1024 == 0


def test_a_copy_differs_in_one_line(probe: ModuleType) -> None:
    source = render_variant(VARIANTS[FAST.stem], CHECKOUT)
    copy = probe.held_down(source, 2048)
    ast.parse(copy)
    [line] = set(copy.splitlines()) - set(source.splitlines())
    assert "2048" in line and len(copy.splitlines()) == len(source.splitlines()) + 1
    with pytest.raises(UserError, match="no single line"):
        probe.held_down("pass\n", 2048)


def test_copies_that_hold_nothing_down_are_left_out(probe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CTAs of 256 threads fit by registers, whatever shared memory allows."""
    kernels = [probe.Kernel(VARIANTS["k3_stages_d64_threads256_kv_stages1"], Path(), held) for held in (None, 1, 2)]

    class Facts:
        registers, spills, sass = 116, 0, TURNS
        census = property(lambda self: self)

    monkeypatch.setattr(probe, "cached_compile_for_launch", lambda path: None)
    monkeypatch.setattr(probe.compiler, "analyse", lambda compiled: Facts())
    found = probe.compiled(kernels)
    # 8 turns of the loop of Q K^T for a head dim of 64, and 16 of that of P V.
    assert [(kernel.held, kernel.one_bank) for kernel in found] == [
        (None, OneBank(8 * 47, 16 * 6)),
        (1, OneBank(376, 96)),
    ]
    monkeypatch.setattr(Facts, "spills", 3)
    with pytest.raises(UserError, match="spills"):
        probe.compiled(kernels)


def test_the_record_holds_what_is_measured_of_every_kernel(probe: ModuleType) -> None:
    kernel = probe.Kernel(VARIANTS[FAST.stem], Path(), None, 168, {4096: [20.0, 19.0, 25.0]}, {4096: [1900.0]})
    # 4 x 4 x 32 heads x 4096^2 x 64 FLOP in 20 ms.
    record = probe.record_of(kernel)
    assert record.tflops["4096"] == pytest.approx(4 * 4 * 32 * 4096**2 * 64 / 20e-3 / 1e12)
    assert (record.ctas, record.held, record.sm_mhz) == (3, False, {"4096": 1900.0})


def test_a_record_is_read_as_it_was_written(workspace: Workspace) -> None:
    assert stage_sweep.read(workspace) == SWEEP
    assert SWEEP.as_it_is(FAST.stem) == FAST
    stage_sweep.record_path(workspace).write_text("{}")
    with pytest.raises(UserError, match="not a stage sweep"):
        stage_sweep.read(workspace)


def test_facts_are_noted_of_the_code_that_was_measured(probe: ModuleType) -> None:
    kernels = [
        probe.Kernel(VARIANTS[FAST.stem], Path(), held, 168, one_bank=OneBank(712, number))
        for number, held in enumerate((None, 1))
    ]
    noted = probe.with_facts(SWEEP, kernels)
    assert [row.one_bank for row in noted.measured] == [OneBank(712, 0), OneBank(712, 1)]
    assert [row.model_copy(update={"one_bank": None}) for row in noted.measured] == SWEEP.measured
    kernels[1].registers = 156
    with pytest.raises(UserError, match="156 registers, and measured with 168"):
        probe.with_facts(SWEEP, kernels)


def test_code_with_other_loops_is_refused() -> None:
    spec = VARIANTS["k3_stages_d64_threads256_kv_stages1"].spec
    assert one_bank_of(spec, SimpleNamespace(sass=TURNS)) == OneBank(376, 96)
    swapped = SimpleNamespace(sass=SimpleNamespace(loops=TURNS.loops[::-1]))
    with pytest.raises(UserError, match="128 and 64 multiply-adds .* 64 at 0x40, 128 at 0x80"):
        one_bank_of(spec, swapped)


def test_the_committed_record_is_of_the_sweep() -> None:
    committed = stage_sweep.read(CHECKOUT)
    assert committed is not None
    assert {row.stem for row in committed.measured if not row.held} == set(VARIANTS)
    for row in committed.measured:
        fit = ceiling.occupancy(VARIANTS[row.stem].spec, row.registers).ctas
        assert row.ctas < fit if row.held else row.ctas == fit, row.stem


def test_tables_hold_measured_and_simulated(workspace: Workspace) -> None:
    lines = block(workspace, "sweep", "64 4096").splitlines()
    assert lines[0] == "| head dim 64 | 1 stage | 2 stages | 3 stages | 5 stages |"
    oldest, _ = simulated(VARIANTS[FAST.stem].spec, FAST, 4096)
    assert lines[2] == f"| `k3`, 128 threads, 64 x 64 | – | 3 CTAs: 27.6 ({oldest:.3g}) | – | – |"
    assert lines[-1].endswith("measured somehow: a GPU, 2026-01-02.")
    held = block(workspace, "held", "64 k3_stages").splitlines()
    one, _ = simulated(VARIANTS[FAST.stem].spec, HELD, 4096)
    assert held[0] == "| head dim 64 | 1 CTA on an SM | 3 CTAs on an SM |"
    assert held[2] == f"| `k3`, 128 threads, 64 x 64, 2 stages | 18.9 ({one:.3g}) | 27.6 ({oldest:.3g}) |"
    assert one < 0.7 * oldest


def test_predictions_know_what_stands_in_the_code() -> None:
    """Multiply-adds that wait for registers cost issue slots, which three CTAs that share an SM all need. So many cost
    7 % of the speed, measured on an H200 with cubins of k3_2_d64 whose registers were patched."""
    spec = VARIANTS[FAST.stem].spec
    slower = FAST.model_copy(update={"one_bank": OneBank(712, 96)})
    assert 0.91 < simulated(spec, slower, 4096)[0] / simulated(spec, FAST, 4096)[0] < 0.95


def test_predictions_are_at_the_clock_that_was_read() -> None:
    spec = VARIANTS[FAST.stem].spec
    faster = FAST.model_copy(update={"sm_mhz": {"4096": 1.1 * 1830.0}})
    assert simulated(spec, faster, 4096)[0] == pytest.approx(1.1 * simulated(spec, FAST, 4096)[0])


def test_a_table_without_its_record_is_refused(workspace: Workspace) -> None:
    stage_sweep.record_path(workspace).unlink()
    with pytest.raises(LadderError, match="tests/gpu/stage_sweep.py writes it"):
        block(workspace, "sweep", "64 4096")
