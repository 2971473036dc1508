"""What the simulator makes of a whole problem: parts of keys, SMs that are busy, and bytes out of HBM."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from rendering import CHECKOUT, variants

from fa3gen import cli
from fa3gen.design import ceiling, splits
from fa3gen.design.family import PackedShape, Shape, call_of_lengths
from fa3gen.design.work import Problem
from fa3gen.hardware import chips
from fa3gen.inspect import simulation
from fa3gen.inspect.simulation import comparison
from fa3gen.inspect.simulation.document import SCHEMA
from fa3gen.inspect.simulation.run import Dealt, with_stages
from fa3gen.inspect.simulation.times import HBM_LATENCY_MORE
from fa3gen.measure.packed_cells import DECODING_LENGTHS
from fa3gen.spec.model import Forward

CHIP = chips.H200
BYTES_A_CYCLE = CHIP.hbm.value / CHIP.clock_hz.value
DENSE, EVEN, PAGED = "fwd_decode_d128", "fwd_packed_decode_d128", "fwd_paged_decode_d128"
CHUNKS = "fwd_packed_chunks_d128_causal"


def spec(stem: str) -> Forward:
    found = variants()[stem].spec
    assert isinstance(found, Forward)
    return found


def dealt(stem: str, shape: Shape | PackedShape, *, chip: chips.Chip = CHIP, warm: bool = False) -> Dealt:
    return simulation.deal(Problem(spec(stem), shape), simulation.times_of(spec(stem), chip), chip, warm=warm)


def test_parts_of_dense_tensors_are_dealt_out() -> None:
    """As many as the entry point counts, a CTA for each, of whole tiles of keys; their sums come behind."""
    shape = Shape(8, 1, 4096, 32, 8)  # 64 tiles of queries on 132 SMs: 2 parts of 32 tiles of 64 keys
    found = dealt(DENSE, shape)
    assert splits.num_parts(spec(DENSE), shape, 132) == 2
    assert found.places == ((32,),) * 128
    # 4 rows of a tile exist, in two parts each, of 128 columns and LSE in float32, to L2 and back.
    size = 64 * 2 * 4 * 129 * 4
    assert found.adding_up == pytest.approx(2 * (simulation.times_of(spec(DENSE), CHIP).load_latency + size / 5120))
    whole = dealt(DENSE, Shape(64, 1, 4096, 32, 8))  # 512 tiles: nobody adds anything up
    assert whole.adding_up == 0 and {steps for place in whole.places for steps in place} == {64}


@pytest.mark.parametrize("stem", [EVEN, PAGED])
@pytest.mark.parametrize("lengths", DECODING_LENGTHS)
def test_shares_are_equal_and_cover_all_keys(stem: str, lengths: str) -> None:
    problem = Problem(spec(stem), call_of_lengths(spec(stem), *DECODING_LENGTHS[lengths], heads=(32, 8)))
    parts = ceiling.parts(problem, 132)
    assert sum(part.steps for of_cta in parts for part in of_cta) == problem.visited
    shares = [sum(part.steps for part in of_cta) for of_cta in parts]
    assert set(shares[:-1]) <= {splits.share_of(spec(stem), problem.shape, 132)} and shares[-1] <= shares[0]
    # Of how many parts a tile is, each of its parts says.
    assert sum(1 / part.of for of_cta in parts for part in of_cta) == pytest.approx(problem.tiles)
    assert {part.rows for of_cta in parts for part in of_cta} == {4 * max(DECODING_LENGTHS[lengths][0])}


@pytest.mark.parametrize(
    ("queries", "keys", "heads"),
    [
        ((4096,), (4096,), (8, 1)),
        ((4096,), (4096,), (12, 1)),
        ((512, *[1] * 7), (8192,) * 8, (8, 8)),
        ((9,), (3,), (8, 1)),
    ],
)
def test_shares_of_steps_that_rows_see(queries: tuple[int, ...], keys: tuple[int, ...], heads: tuple[int, int]) -> None:
    """About as many for each CTA: a tile's steps are counted by a formula, and its last one has what is left."""
    problem = Problem(spec(CHUNKS), PackedShape(queries, keys, *heads))
    parts = ceiling.parts(problem, 132)
    assert sum(part.steps for of_cta in parts for part in of_cta) == problem.visited
    assert sum(1 / part.of for of_cta in parts for part in of_cta) == pytest.approx(problem.tiles)
    share = splits.share_of(spec(CHUNKS), problem.shape, 132)
    assert len(parts) == ceiling.ctas_of(problem, 132) <= 132
    assert max(sum(part.steps for part in of_cta) for of_cta in parts) <= share + 1


def test_parts_of_a_fixed_number_of_keys() -> None:
    problem = Problem(spec("fwd_decode_fixed_d64"), Shape(1, 1, 1200, 8, 1))  # 512, 512 and 176 keys, 64 in a tile
    assert [[part.steps for part in each] for each in ceiling.parts(problem, 132)] == [[8], [8], [3]]


@pytest.mark.parametrize("stem", [DENSE, EVEN, PAGED])
def test_many_keys_are_bound_by_hbm(stem: str) -> None:
    """Never beyond its rate, near it where all SMs read, and half as fast where it is."""
    shape = Shape(64, 1, 4096, 32, 8)
    packed = call_of_lengths(spec(stem), (1,) * 64, (4096,) * 64, heads=(32, 8))
    found = dealt(stem, shape if stem == DENSE else packed)
    assert 0.9 * CHIP.hbm.value < found.gigabytes * 1e9 < CHIP.hbm.value
    assert found.memory.busy_sms > 120 and found.memory.from_hbm == found.memory.loaded == 64 * 4096 * 8 * 512
    assert found.times.load_rate == pytest.approx(BYTES_A_CYCLE / found.memory.busy_sms)
    slow = replace(CHIP, hbm=replace(CHIP.hbm, value=CHIP.hbm.value / 2))
    assert dealt(stem, found.problem.shape, chip=slow).cycles == pytest.approx(2 * found.cycles, rel=0.05)


def test_few_ctas_leave_hbm_waiting() -> None:
    """One tile of queries in one module without parts: its SM has no more than its share of L2."""
    module = "fwd_packed_d128"
    alone = dealt(module, PackedShape((1,), (32768,), 1, 1))
    assert alone.memory.busy_sms == 1 and alone.memory.in_flight == 2 * 128 * 512  # two stages of K and of V
    assert alone.times.load_rate == simulation.times_of(spec(module), CHIP).load_rate
    many = dealt(module, PackedShape((1,) * 132, (32768,) * 132, 1, 1))
    assert many.memory.busy_sms == 132 and many.memory.in_flight == 132 * alone.memory.in_flight
    assert alone.gigabytes < many.gigabytes / 60
    # A long sequence beside short ones has HBM to itself for most of the time.
    one_long = dealt(module, PackedShape((1,) * 64, (32768, *(128,) * 63), 1, 1))
    assert one_long.memory.busy_sms == 2


def test_fewer_bytes_under_way_are_slower() -> None:
    """Little's law: a stage of 16 KB of K and one of V, of 1,200 cycles each, are not 19.9 bytes a cycle."""
    problem = Problem(spec(EVEN), call_of_lengths(spec(EVEN), (1,) * 64, (4096,) * 64, heads=(32, 8)))
    times = simulation.times_of(spec(EVEN), CHIP)
    one_stage = Problem(with_stages(spec(EVEN), 1), problem.shape)
    six, one = (simulation.deal(each, times, CHIP) for each in (problem, one_stage))
    assert six.memory.in_flight == 6 * one.memory.in_flight == 128 * 6 * 64 * 512  # 8 heads, 16 CTAs each
    assert one.gigabytes < 0.9 * six.gigabytes


def test_keys_that_a_launch_finds_in_l2() -> None:
    """Those of the launch before, where L2 has room; those that many tiles of queries load, in any case."""
    small, large = Shape(1, 1, 4096, 32, 8), Shape(64, 1, 4096, 32, 8)
    cold, warm = dealt(DENSE, small), dealt(DENSE, small, warm=True)
    assert (cold.memory.from_hbm, warm.memory.from_hbm) == (4096 * 8 * 512, 0) and warm.cycles < cold.cycles
    assert dealt(DENSE, large, warm=True) == dealt(DENSE, large)
    assert warm.times == simulation.times_of(spec(DENSE), CHIP)
    assert cold.times.load_latency - warm.times.load_latency == pytest.approx(HBM_LATENCY_MORE)
    prefill = dealt("fwd_d128", Shape(1, 4096, 4096, 16, 16))
    assert prefill.memory.from_hbm == 0 and prefill.memory.loaded == 32 * 16 * 4096 * 512
    twice = dealt("fwd_d128", Shape(1, 256, 4096, 16, 16))  # two tiles of queries load each key
    assert twice.memory.share == 0.5


@pytest.fixture
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CHECKOUT.root)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.usefixtures("in_the_checkout")
def test_what_the_command_says_of_parts_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["simulate", DENSE, "--stages", "6", "--lengths", "decode8_on_4k", "--heads", "32", "--heads-kv", "8"]
    assert cli.main(call) == 0
    said = capsys.readouterr().out
    assert "keys in parts: 2 of each tile of queries" in said and "dealt out to 128 CTAs on 132 SMs" in said
    assert "134.2 MB of K and V are loaded, 134.2 MB of them from HBM, by 128 SMs at a time" in said
    assert "1 CTA on an SM, 32 tiles of keys" in said  # a part
    assert cli.main([*call, "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    jsonschema.validate(written, SCHEMA)
    problem = written["modules"][0]["problem"]
    assert problem["memory"]["busy_sms"] == 128 and problem["adding_up"] > 0
    assert problem["gigabytes"] < CHIP.hbm.value / 1e9
    assert cli.main(["simulate", DENSE, "--lengths", "1x300,1x301"]) == 2
    assert "of which all sequences have one length" in capsys.readouterr().err


def test_modules_are_compared_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the package in a folder without `generated/`; of a spec of the user's own beside it, if it is rendered."""
    monkeypatch.chdir(tmp_path)
    for stem in ("k4_2_d128", f"{DENSE}_causal", "fwd_fp16_packed_d128_causal"):  # in few packed cells, where any does
        assert cli.main(["simulate", stem, "--compare"]) == 0
        said = capsys.readouterr().out
        assert stem in said and "measured" in said
    (tmp_path / "mine.yaml").write_text("summary: x\nextends: k4_2\nproblem: {head_dim: 64}\nmatrix: {}\n")
    assert cli.main(["simulate", "./mine.yaml", "--compare"]) == 2
    assert "write them with: fa3gen render mine.yaml" in capsys.readouterr().err


def test_dense_decoding_is_compared_with_what_was_tuned() -> None:
    found = list(comparison.cells(CHECKOUT, [variants()["fwd_decode_d128_causal"]]))
    assert {"64 of 1x4k", "1 of 1x32k", "4 of 8x4k"} <= {cell.name for cell in found}
    [cell] = [each for each in found if (each.name, each.heads) == ("64 of 1x4k", "32/8")]
    assert cell.kv_bytes == 64 * 4096 * 8 * 512 and cell.measured is not None


def test_cells_by_bytes_of_keys() -> None:
    """Ratios of one module in a row for each range of sizes that has any; cells without a speed are left out."""
    one = comparison.Cell("a", "x", "16", None, 1, 10.0, 10.0, 9.0, 300_000_000)
    cells = [
        one,
        replace(one, measured=8.0),
        replace(one, kv_bytes=5_000_000, measured=4.0),
        replace(one, measured=None),
    ]
    lines = comparison.decoding_table(cells).splitlines()[2:]
    assert lines == ["| `a` | up to 10 MB | 1 | 0.40 | 0.40 | 0.40 |", "| `a` | over 200 MB | 2 | 0.80 | 0.85 | 0.90 |"]
