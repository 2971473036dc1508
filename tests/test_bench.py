"""The benchmark's arithmetic, planning and reporting, on made-up timings; nothing here measures anything."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rendering import variants

from fa3gen.base.errors import UserError
from fa3gen.design.family import mask_label
from fa3gen.design.key_order import ORDER
from fa3gen.design.masks import reach
from fa3gen.measure import bench, bench_report
from fa3gen.measure.bench import Bench, Cell, CellResult, Competitor, Result, Runner, module_competitor, plan_cells
from fa3gen.measure.peers import Unavailable
from fa3gen.run import gpu
from fa3gen.spec.model import CausalMask, Forward, NoMask, Spec, WindowMask
from fa3gen.verify import inputs, reference

CPU = torch.device("cpu")
MADE_UP = gpu.Environment("A made-up GPU", None, None, None, None, None, "3.12")
NOTHING = gpu.Sample(1980.0, 650.0, 60.0)


def spec_of(head_dim: int, mask: Any, dtype: str = "bf16", handoff: str = "global_f32") -> Spec:
    return Forward.model_validate(
        {
            "problem": {"head_dim": head_dim, "dtype": dtype},
            "mask": mask,
            "tile": {"q": 64, "kv": 64, "threads": 128},
            "load": {"engine": "sync"},
            "qk": {"engine": "scalar"},
            "pv": {"engine": "scalar"},
            "handoff": {"through": handoff},
        }
    )


# -- arithmetic


def test_flops_by_hand() -> None:
    full = Cell(128, NoMask(), 16384)
    assert (full.batch, full.heads) == (1, 16)
    assert full.flops == 4 * 1 * 16 * 16384 * 16384 * 128 == 2_199_023_255_552
    assert Cell(128, CausalMask(), 16384).flops == 1_099_511_627_776
    short = Cell(64, NoMask(), 512)
    assert (short.batch, short.heads) == (32, 32)
    assert short.flops == 4 * 32 * 32 * 512 * 512 * 64 == 68_719_476_736


def test_window_flops_count_visible_pairs() -> None:
    # 512 rows that see themselves and 2 keys to the left: 3 each, less 2 and 1 for the first two rows
    assert Cell(64, WindowMask(left=2, right=0), 512).flops == 4 * 32 * 32 * (512 * 3 - 3) * 64


def test_tflops_by_hand() -> None:
    # 2.199 TFLOP in 4 ms
    assert bench.tflops(Cell(128, NoMask(), 16384), 4.0) == pytest.approx(549.756, rel=1e-5)


def test_flops_count_both_head_dims() -> None:
    cell = Cell(192, NoMask(), 16384, head_dim_v=128)
    assert cell.heads == 10  # 2048 / 192 is no whole number
    assert cell.flops == 2 * 10 * 16384**2 * (192 + 128)
    assert (cell.family.dims, Cell(192, NoMask(), 16384).family.dims) == ("192/128", "192")


def test_masks_have_names() -> None:
    masks = [NoMask(), CausalMask(), WindowMask(left=512, right=0)]
    assert [mask_label(mask) for mask in masks] == ["full", "causal", "window512_0"]


# -- planning


def test_the_grid_holds_what_the_specs_serve() -> None:
    specs = [spec_of(64, "none"), spec_of(64, "causal"), spec_of(128, "none"), spec_of(64, "none")]
    cells = plan_cells(specs)
    assert len(cells) == 3 * 6
    assert [cell.seq_len for cell in cells[:6]] == [512, 1024, 2048, 4096, 8192, 16384]
    assert [(cell.head_dim, mask_label(cell.mask)) for cell in cells[::6]] == [
        (64, "full"),
        (64, "causal"),
        (128, "full"),
    ]


def test_v_of_another_head_dim_makes_another_cell() -> None:
    spec = spec_of(128, "none")
    narrow, same = (
        spec.model_copy(update={"problem": spec.problem.model_copy(update={"head_dim_v": v_dim})})
        for v_dim in (64, 128)
    )
    cells = plan_cells([spec, same, narrow], seq_lens=[512])
    assert [cell.family.dims for cell in cells] == ["128/64", "128"]
    competitor = bench.module_competitor("x", narrow, lambda: None)
    assert [competitor.serves(cell) for cell in cells] == [True, False]


def test_a_module_that_packs_heads_says_why_it_is_not_timed() -> None:
    spec = spec_of(128, "none")
    packed = spec.model_copy(update={"tile": spec.tile.model_copy(update={"pack_heads": 4})})
    with pytest.raises(Unavailable, match="packs 4 query heads of one kv head"):
        bench.module_competitor("x", packed, lambda: None).prepare(Cell(128, NoMask(), 512))


def test_modules_with_sinks_or_a_cap_have_cells_of_their_own() -> None:
    """With the arguments that their calls take, and without peers, which have none of these."""
    stems = ("fwd_d64_causal", "fwd_d64_sink_causal", "fwd_d128_softcap_causal")
    specs = [variants()[stem].spec for stem in stems]
    plain, sunk, capped = cells = plan_cells(specs, seq_lens=[512])
    assert [cell.family.keywords for cell in cells] == [(), ("sinks",), ("softcap",)]
    asked: list[dict[str, Any]] = []
    module = SimpleNamespace(attention=lambda q, k, v, **options: asked.append(options))
    for spec, own in zip(specs, cells, strict=True):
        found = module_competitor("x", spec, lambda: module)
        assert [found.serves(cell) for cell in cells] == [cell == own for cell in cells]
        q = torch.zeros(1, 2, 3, spec.problem.head_dim)
        found.prepare(own)(q, q, q)
        assert set(asked[-1]) == set(own.family.keywords)
    assert asked[1]["sinks"].shape == (3,) and asked[2]["softcap"] > 0
    for peer in bench.peer_competitors():
        assert [peer.serves(cell) for cell in cells] == [True, False, False]
    titles = [
        title for title, _ in bench_report.panels(Bench(MADE_UP, tuple(CellResult(c, (), NOTHING) for c in cells)))
    ]
    assert titles == [
        "bf16, head dim 64, causal",
        "bf16, head dim 64, causal, sinks",
        "bf16, head dim 128, causal, softcap",
    ]
    q, k, v = (torch.randn(1, 70, 3, 64, generator=torch.Generator().manual_seed(1)) for _ in range(3))
    named = inputs.usual_keywords(("sinks", "softcap"), 3, CPU)
    wanted = reference.attention(q, k, v, reach=reach(CausalMask()), **named).out[:, -64:].float()
    torch.testing.assert_close(bench.last_rows(CausalMask(), (q, k, v), tuple(named)), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stem", ["k7_two_levels_d128", "k7_v_k_d128", "k8_d128", "fwd_fp8_v_permuted_d128"])
def test_modules_of_8_bits_are_timed_on_tensors_of_8_bits(stem: str) -> None:
    """O is bfloat16, and right within what 4 bits of P cost; the reference has v in order."""
    spec, given = variants()[stem].spec, []
    permuted = spec.problem.v_keys == "permuted"

    def attention(q: Any, k: Any, v: Any) -> torch.Tensor:
        given.append((q.dtype, k.dtype, v.dtype, v.stride(1)))
        if permuted:
            v = v.float().reshape(*v.shape[:1], -1, 16, *v.shape[2:])[:, :, torch.tensor(ORDER).argsort()].flatten(1, 2)
        return (
            reference.attention(q, k, v, reach=reach(spec.mask), compute_dtype=torch.float32).out.mul(1.04).bfloat16()
        )

    competitor = module_competitor(stem, spec, lambda: SimpleNamespace(attention=attention))
    [cell] = [Cell.of(spec, 4096)]
    assert competitor.serves(cell) and not competitor.serves(Cell(128, NoMask(), 4096)) and cell.dtype == "e4m3"
    [(title, _)] = bench_report.panels(Bench(MADE_UP, (CellResult(cell, (), NOTHING),)))
    assert title == "e4m3, head dim 128, full"
    small = Cell.of(spec, 16384 // 256)
    timer = SimpleNamespace(
        time=lambda launches: [1.0 for _ in launches], free_bytes=lambda: 2**40, sample=lambda: NOTHING
    )
    [result] = Runner([competitor], timer, CPU, spend_ms=1, limit_ms=1e6).run_cell(small).results  # type: ignore[arg-type]
    assert result.reason is None and result.tflops == bench.tflops(small, 1.0)
    assert set(given) == {(*[torch.float8_e4m3fn] * 3, 1 if "_v_" in stem else 2048)}


def test_the_grid_can_be_narrowed() -> None:
    specs = [spec_of(d, mask) for d in (64, 128) for mask in ("none", "causal")]
    assert plan_cells(specs, head_dims=[128], masks=["causal"], seq_lens=[4096]) == [Cell(128, CausalMask(), 4096)]
    assert [cell.seq_len for cell in plan_cells(specs[:1], quick=True)] == [4096, 16384]


@pytest.mark.parametrize(
    ("narrow", "message"),
    [
        ({"seq_lens": [1000]}, "--seq-len 1000 does not divide 16384; use one of 512, 1024"),
        ({"head_dims": [128]}, "they serve head dim 64 full"),
        ({"masks": ["casual"]}, "they serve head dim 64 full"),
    ],
)
def test_a_grid_with_nothing_in_it_is_refused(narrow: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_cells([spec_of(64, "none")], **narrow)


def test_a_module_serves_its_own_problem_only() -> None:
    competitor = bench.module_competitor("k1", spec_of(64, "causal"), lambda: None)
    assert competitor.serves(Cell(64, CausalMask(), 4096))
    others = [Cell(64, NoMask(), 4096), Cell(128, CausalMask(), 4096), Cell(64, CausalMask(), 4096, "fp16")]
    assert not any(competitor.serves(cell) for cell in others)
    assert competitor.scratch(Cell(64, CausalMask(), 16384)) == 4 * 32 * 16384**2  # scores in float32


# -- running, with a timer that makes its numbers up


class MadeUpTimer:
    """Every launch takes as many milliseconds as `pace` says for the function's name."""

    def __init__(self, pace: dict[str, float], free: int = 2**40) -> None:
        self.pace, self.free, self.order = pace, free, []  # type: ignore[var-annotated]

    def time(self, launches: Sequence[Callable[[], Any]]) -> list[float]:
        names = []
        for launch in launches:
            names.append(CALLS_OF[int(launch().data_ptr())])
        self.order.append(names)
        return [self.pace[name] for name in names]

    def free_bytes(self) -> int:
        return self.free

    def sample(self) -> gpu.Sample:
        return NOTHING


CALLS_OF: dict[int, str] = {}
KEPT: list[torch.Tensor] = []


def competitor(name: str, *, generated: bool = True, attend: Any = None, **facts: Any) -> Competitor:
    """Something that returns the right output, which it computes once per set of inputs."""

    def prepare(cell: Cell) -> Any:
        outputs: dict[int, torch.Tensor] = {}

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if q.data_ptr() not in outputs:
                out = reference.attention(q, k, v, reach=reach(cell.mask), compute_dtype=torch.float32).out.to(q.dtype)
                outputs[q.data_ptr()] = out if attend is None else attend(out)
                CALLS_OF[outputs[q.data_ptr()].data_ptr()] = name
                KEPT.append(outputs[q.data_ptr()])
            return outputs[q.data_ptr()]

        return run

    return Competitor(name, generated, lambda cell: True, prepare, **facts)


@pytest.fixture
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TOKENS", 256)
    monkeypatch.setattr(bench, "WIDTH", 128)


def runner(competitors: Sequence[Competitor], timer: MadeUpTimer, **limits: float) -> Runner:
    return Runner(competitors, timer, CPU, **{"spend_ms": 40.0, "limit_ms": 1000.0, **limits})


@pytest.mark.usefixtures("small_grid")
def test_competitors_take_turns_and_the_median_counts() -> None:
    timer = MadeUpTimer({"a": 10.0, "b": 8.0})
    result = runner([competitor("a"), competitor("b")], timer).run_cell(Cell(64, CausalMask(), 128))
    a, b = result.results
    assert timer.order[:2] == [["a"], ["b"]]  # warm-up
    rounds = timer.order[2:]
    assert [sorted(names) for names in rounds] == [["a", "b"]] * 4 + [["b"]]  # 40 ms are 4 launches of 10 and 5 of 8
    assert ["a", "b"] in rounds and ["b", "a"] in rounds  # nobody always follows the same one
    assert (a.median_ms, a.rounds, b.rounds) == (10.0, 4, 5)
    assert a.tflops == bench.tflops(result.cell, 10.0)
    assert result.sample == NOTHING


@pytest.mark.usefixtures("small_grid")
def test_a_wrong_result_has_no_speed() -> None:
    timer = MadeUpTimer({"right": 1.0})
    wrong = competitor("wrong", attend=lambda out: out * 1.1)
    result = runner([wrong, competitor("right")], timer).run_cell(Cell(64, NoMask(), 128))
    assert result.results[0].reason is not None and result.results[0].reason.startswith("wrong result")
    assert result.results[0].tflops is None and result.results[0].failed
    assert result.results[1].tflops is not None
    assert Bench(MADE_UP, (result,)).failed


@pytest.mark.usefixtures("small_grid")
def test_a_window_is_checked_in_its_last_rows() -> None:
    timer = MadeUpTimer({"right": 1.0})
    result = runner([competitor("right")], timer).run_cell(Cell(64, WindowMask(left=20, right=0), 256))
    assert result.results[0].reason is None


@pytest.mark.usefixtures("small_grid")
def test_what_is_predicted_to_take_too_long_is_not_launched() -> None:
    timer = MadeUpTimer({"slow": 300.0})
    run = runner([competitor("slow")], timer, limit_ms=2000.0)
    first = run.run_cell(Cell(64, NoMask(), 64))
    launches = len(timer.order)
    second = run.run_cell(Cell(64, NoMask(), 256))  # four times the work: 5 launches of 1200 ms
    assert first.results[0].median_ms == 300.0
    assert second.results[0].reason == "over budget: about 6.0 s predicted, 2.0 s allowed"
    assert second.results[0].tflops is None and not second.results[0].failed
    assert len(timer.order) == launches


@pytest.mark.usefixtures("small_grid")
def test_scratch_that_does_not_fit_is_not_tried() -> None:
    timer = MadeUpTimer({}, free=2**30)
    naive = competitor("k1", scratch=lambda cell: 3 * 2**30)
    result = runner([naive], timer).run_cell(Cell(64, NoMask(), 128)).results[0]
    assert result.reason == "out of memory: needs 3 GiB of scratch, 1 GiB are free" and not result.failed


@pytest.mark.usefixtures("small_grid")
def test_a_peer_that_is_missing_and_a_module_that_raises_are_told_apart() -> None:
    def missing(cell: Cell) -> Any:
        raise Unavailable("flash-attn-4 is not installed")

    def raising(cell: Cell) -> Any:
        raise RuntimeError("launch failed")

    competitors = [
        Competitor("fa4", False, lambda cell: True, missing),
        Competitor("k1", True, lambda cell: True, raising),
    ]
    peer, own = runner(competitors, MadeUpTimer({})).run_cell(Cell(64, NoMask(), 128)).results
    assert peer.reason == "flash-attn-4 is not installed" and not peer.failed
    assert own.reason == "raised RuntimeError: launch failed" and own.failed


# -- reporting


def made_up_bench() -> Bench:
    """Speeds that nobody measured, for two masks."""
    cells = []
    for mask in (NoMask(), CausalMask()):
        for number, seq_len in enumerate((512, 1024, 16384)):
            results = (
                Result("k4_2", True, tflops=300.0 + number, median_ms=1.0, min_ms=1.0, max_ms=1.0, rounds=3),
                Result("k1", True, reason="over budget: about 60.0 s predicted, 10.0 s allowed"),
                Result("cuDNN", False, tflops=500.0 - 200 * number, median_ms=1.0, min_ms=1.0, max_ms=1.0, rounds=3),
                Result("flash-attn-3", False, reason="flash-attn-3 is not installed"),
            )
            cells.append(CellResult(Cell(128, mask, seq_len), results, NOTHING))
    return Bench(MADE_UP, tuple(cells))


def test_the_table_shows_numbers_reasons_and_the_best() -> None:
    from rich.console import Console

    full, causal = bench_report.tables(made_up_bench())
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - closed with the process
    console.print(full)
    text = console.export_text()
    assert "TFLOP/s, bf16, head dim 128, full" in text and "512" in text and "16k" in text
    assert "k4_2" in text and "300" in text and "over budget" in text and "n/a" in text
    assert list(full.columns[1].cells) == ["300", "over budget", "[bold]500[/]", "n/a"]
    assert list(full.columns[2].cells) == ["[bold]301[/]", "over budget", "300", "n/a"]
    assert str(causal.title).endswith("causal; one launch at a time, without a CUDA graph, L2 overwritten before")


def test_every_reason_is_given_in_full() -> None:
    said = bench_report.reasons(made_up_bench())
    assert said == [
        "k1: over budget: about 60.0 s predicted, 10.0 s allowed",
        "flash-attn-3: flash-attn-3 is not installed",
    ]


def test_json_has_protocol_environment_and_cells(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "bench.json"
    bench_report.write_json(made_up_bench(), path)
    document = json.loads(path.read_text())
    assert document["environment"]["gpu"] == "A made-up GPU"
    assert document["cells"][0]["results"][1]["tflops"] is None
    assert document["cells"][0]["gpu"] == {"sm_mhz": 1980.0, "power_w": 650.0, "temperature_c": 60.0}
    assert {cell["mask"] for cell in document["cells"]} == {"full", "causal"}


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_plot_by_suffix(tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / f"bench{suffix}"
    bench_report.plot(made_up_bench(), path)
    assert path.read_bytes().startswith(magic) and path.stat().st_size > 5000


def test_a_plot_of_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the suffix decides the format; use .png or .svg"):
        bench_report.check_plot_path(tmp_path / "bench.gif")


def test_speeds_are_printed_as_precisely_as_they_repeat() -> None:
    from fa3gen.base.markdown import speed

    assert [speed(value) for value in (549.756, 10.4, 9.87, 0.123, None)] == ["550", "10", "9.9", "0.12", ""]


def test_without_a_hopper_gpu_the_command_says_what_it_needs() -> None:
    if gpu.hopper_device() is not None:
        pytest.skip("there is a Hopper GPU here")
    with pytest.raises(UserError, match="needs a Hopper GPU .* torch"):
        bench.require_hopper()


def test_importing_the_commands_imports_no_torch() -> None:
    code = "import sys, fa3gen.cli.bench, fa3gen.cli.verify, fa3gen.records.evidence; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0


def test_inputs_are_laid_out_as_a_module_takes_them() -> None:
    """Modules of transposed inputs serve the usual cells, on copies of the same tensors."""
    spec = variants()["k4_v_k_d64"].spec
    own = module_competitor("k4_v_k_d64", spec, lambda: None)
    assert own.serves(Cell(64, NoMask(), 512)) and not own.serves(Cell(64, CausalMask(), 512))
    q, k, v = (torch.randn(2, 40, 3, 64).bfloat16() for _ in range(3))
    placed = own.placed((q, k, v))
    assert placed[0] is q and placed[1] is k and torch.equal(placed[2], v) and placed[2].stride(1) == 1
