"""The comparison of the CPU model with a GPU: its inputs, its differences, its record and its document."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rendering import attention_stems, variants

from fa3gen.base import files
from fa3gen.base.errors import UserError
from fa3gen.design.family import Family
from fa3gen.design.masks import reach
from fa3gen.design.workspace import Workspace
from fa3gen.spec.model import CausalMask, Forward, Mask, NoMask, WindowMask
from fa3gen.verify import comparison, reference
from fa3gen.verify.comparison import CASES, Case, Comparison

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

import compare_cpu_model as runner

WORKSPACE = Workspace.find(Path(__file__).parent)
DENSE = [stem for stem in attention_stems() if comparison.is_dense(WORKSPACE, stem)]
MODULES = len(DENSE)
SELECTIONS = [case for case in CASES if case.distribution == "selection"]
MASKS: list[Mask] = [
    NoMask(kind="none"),
    CausalMask(kind="causal"),
    WindowMask(kind="window", left=200, right=70),
    WindowMask(kind="window", left=512, right=0),
]
STEM = "k4_2_d64"
DIGEST = "860fcb91e9b39ba29d1b263a3fad533dbdb7b1c9b0274f01e167b88f2c3cb363"
SIDE = {name: "x" for name in comparison.Side.model_fields}


# -- inputs


def forward(stem: str) -> Forward:
    spec = variants()[stem].spec
    assert isinstance(spec, Forward)
    return spec


def test_inputs_are_the_same_bits_everywhere() -> None:
    """A digest of one draw: NumPy promises its streams only as long as nobody changes them."""
    inputs = comparison.make_inputs(CASES[3], mask=MASKS[0], head_dim=64, dtype=torch.bfloat16)
    assert comparison.digest((inputs.q, inputs.k, inputs.v)) == DIGEST


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("case", SELECTIONS, ids=lambda case: case.name)
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float16), (128, torch.bfloat16)], ids=str)
def test_a_selection_is_exact_attention(case: Case, mask: Mask, head_dim: int, dtype: torch.dtype) -> None:
    inputs = comparison.make_inputs(case, mask=mask, head_dim=head_dim, dtype=dtype)
    exact = reference.attention(inputs.q, inputs.k, inputs.v, reach=reach(mask))
    assert torch.equal(exact.out, comparison.selected_output(inputs).double())
    assert inputs.selected is not None
    assert torch.equal(inputs.selected < 0, exact.lse == -math.inf)


def test_selections_reach_both_ends_every_tile_and_rows_without_a_key() -> None:
    tiles: set[int] = set()
    for mask in MASKS:
        for case in SELECTIONS:
            selected = comparison.make_inputs(case, mask=mask, head_dim=64, dtype=torch.float16).selected
            assert selected is not None
            if mask == MASKS[0]:
                assert {0, case.seq_k - 1} <= set(selected.flatten().tolist())
                tiles |= set((selected // 64).flatten().tolist())
            if mask == MASKS[1] and case.seq_q > case.seq_k:
                assert (selected < 0).any() and (selected >= 0).any()
    assert tiles == set(range(6))


@pytest.mark.parametrize("case", SELECTIONS, ids=lambda case: case.name)
@pytest.mark.parametrize("stem", ["k7_e5m2_d128_causal", "fwd_d128_softcap_causal", "k4_transposed_d64"])
def test_every_module_gets_what_it_takes(stem: str, case: Case) -> None:
    """K and V in e5m2 beside q in e4m3, and rows selected; a cap that leaves nothing to select; and strides."""
    spec = forward(stem)
    made = comparison.make_for(spec, case)
    dtypes = {"k7_e5m2_d128_causal": (torch.float8_e4m3fn, torch.float8_e5m2)}
    q_dtype, kv_dtype = dtypes.get(stem, (torch.bfloat16, torch.bfloat16))
    assert (made.q.dtype, made.k.dtype, made.v.dtype) == (q_dtype, kv_dtype, kv_dtype)
    assert (made.selected is None) == (stem == "fwd_d128_softcap_causal")
    if made.selected is None:
        assert made.keywords["softcap"] <= 64
        return
    exact = reference.attention(made.q, made.k, made.values, reach=reach(spec.mask))
    assert torch.equal(exact.out, comparison.selected_output(made).double())
    for tensor in (made.q, made.k, made.v):
        moved = runner.moved(tensor, "cpu")
        assert moved.stride() == tensor.stride() and torch.equal(moved.double(), tensor.double())
    assert (made.k.stride(1) == 1) == (stem == "k4_transposed_d64")


def test_modules_of_dense_tensors_alone_are_asked_for() -> None:
    asked = [task.name for task in runner.tasks() if task.kind == "module"]
    assert sorted(asked) == sorted(DENSE) and 0 < len(DENSE) < len(attention_stems())


# -- differences


def test_difference_counts_bits_kinds_and_ulps() -> None:
    gpu = np.array([0x3F80, 0x3F80, 0x4000, 0x7FC0, 0x0000, 0x8000], np.uint16)  # 1, 1, 2, NaN, 0, -0
    cpu = np.array([0x3F80, 0x3F81, 0x4002, 0x3F80, 0x0001, 0x0000], np.uint16)  # 1, 1 + 2^-7, 2 + 2^-5, 1, 2^-133, 0
    found = comparison.difference(gpu, cpu, "bf16")
    assert (found.elements, found.different, found.other_kind) == (6, 5, 2)
    assert found.max_abs == 2.0**-5 and found.max_ulps == 2.0
    assert found.max_relative == 2.0**-5 / (2 + 2.0**-5)


def test_difference_of_float32_is_seen_at_the_last_place() -> None:
    one = np.ones(3, np.float32)
    found = comparison.difference(one, np.nextafter(one, np.float32(2)), "fp32")
    assert (found.different, found.max_ulps, found.max_abs) == (3, 1.0, 2.0**-23)
    assert comparison.difference(one, one.copy(), "fp32").different == 0


def test_difference_refuses_other_shapes() -> None:
    with pytest.raises(UserError, match="run both sides again"):
        comparison.difference(np.zeros(3, np.float32), np.zeros(4, np.float32), "fp32")


# -- two sides


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two files as the two sides write them. Both are exact attention: nothing here needs a kernel."""
    folder = tmp_path_factory.mktemp("sides")
    (variant,) = WORKSPACE.resolve(STEM)
    spec = variant.spec
    result = runner.Result(runner.Task("module", STEM), source_sha256=files.sha256(WORKSPACE.module_path(STEM)))
    for case in CASES:
        inputs = comparison.make_inputs(case, mask=spec.mask, head_dim=64, dtype=torch.bfloat16)
        exact = reference.attention(inputs.q, inputs.k, inputs.v, reach=reach(spec.mask))
        result.inputs[case.name] = comparison.digest((inputs.q, inputs.k, inputs.v))
        result.arrays[f"{case.name}/out"] = comparison.bits_of(exact.out.to(torch.bfloat16))
        result.arrays[f"{case.name}/lse"] = comparison.bits_of(exact.lse.float())
    product = runner.probe("wgmma").VARIANTS[0]
    wgmma = runner.Result(runner.Task("wgmma", product.name), source_sha256="0")
    for operands, (a, b) in runner.product_operands(product).items():
        wgmma.arrays[f"{operands}/d"] = (a.double() @ b.double().T).float().numpy()
    copy = runner.probe("tma").VARIANTS[0]
    tma = runner.Result(runner.Task("tma", copy.name), source_sha256="0")
    for number in range(len(runner.copy_places(copy))):
        tma.arrays |= {f"{number}/shared": np.zeros(4, np.uint8), f"{number}/stored": np.zeros(9, np.uint8)}
    for name in ("gpu.npz", "cpu.npz"):
        runner.save(folder / name, [result, wgmma, tma], SIDE)
    return folder / "gpu.npz", folder / "cpu.npz"


def _compared(sides: tuple[Path, Path]) -> tuple[Any, Any]:
    return runner.Side(sides[:1]), runner.Side(sides[1:])


def test_equal_sides_do_not_differ(sides: tuple[Path, Path]) -> None:
    found: Comparison = runner.compare(*_compared(sides), WORKSPACE)
    (module,) = found.modules
    assert [case.name for case in module.cases] == [case.name for case in CASES]
    assert [(case.gpu_wrong, case.cpu_wrong) for case in module.cases] == [(0, 0)] * 2 + [(None, None)] * 4
    assert all(case.o.different == 0 and case.lse and case.lse.different == 0 for case in module.cases)
    assert [product.operands for product in found.products] == ["normal", "special"]
    assert all(product.d.different == 0 for product in found.products)
    assert len(found.copies) == 3 and all(copy.shared_different == 0 for copy in found.copies)


def test_one_wrong_element_of_each_kind_is_counted(sides: tuple[Path, Path]) -> None:
    gpu, cpu = _compared(sides)
    gpu.arrays[f"module/{STEM}/selection/out"][0, 3, 1, 5] ^= 1
    cpu.arrays[f"module/{STEM}/normal/out"][0, 0, 0, 0] ^= 1
    cpu.arrays[f"module/{STEM}/normal/lse"][0, 0, 7] += 0.5
    name = runner.probe("wgmma").VARIANTS[0].name
    gpu.arrays[f"wgmma/{name}/normal/d"][63, 63] = math.inf
    gpu.arrays[f"tma/{runner.probe('tma').VARIANTS[0].name}/1/stored"][8] = 1
    found: Comparison = runner.compare(gpu, cpu, WORKSPACE)
    cases = {case.name: case for case in found.modules[0].cases}
    assert (cases["selection"].gpu_wrong, cases["selection"].cpu_wrong) == (1, 0)
    assert cases["normal"].o.different == 1 and 0 < cases["normal"].o.max_ulps <= 1
    lse = cases["normal"].lse
    assert lse is not None and lse.different == 1 and lse.max_abs == pytest.approx(0.5)
    assert found.products[0].d.other_kind == 1
    assert [copy.stored_different for copy in found.copies] == [0, 1, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"error": "Traceback\nValueError: no"}, "failed on the CPU: ValueError: no"),
        ({"source_sha256": "1"}, "source_sha256 of the two sides differ"),
        ({"inputs": {}}, "inputs of the two sides differ"),
    ],
)
def test_sides_that_do_not_fit_are_refused(sides: tuple[Path, Path], change: dict[str, Any], message: str) -> None:
    gpu, cpu = _compared(sides)
    cpu.meta["tasks"][f"module/{STEM}"].update(change)
    with pytest.raises(UserError, match=message):
        runner.compare(gpu, cpu, WORKSPACE)


def test_a_task_that_only_the_gpu_ran_is_refused(sides: tuple[Path, Path]) -> None:
    gpu, cpu = _compared(sides)
    del cpu.meta["tasks"][f"module/{STEM}"]
    with pytest.raises(UserError, match="was not run on the CPU"):
        runner.compare(gpu, cpu, WORKSPACE)


def test_files_of_several_runs_count_as_one_side(sides: tuple[Path, Path], tmp_path: Path) -> None:
    gpu = runner.Side(sides[:1])
    parts = []
    for kind in runner.KINDS:
        (name,) = (task for task in gpu.meta["tasks"] if task.startswith(f"{kind}/"))
        result = runner.Result(runner.Task(*name.split("/", 1)), **gpu.meta["tasks"][name])
        result.arrays = {
            key.removeprefix(f"{name}/"): array for key, array in gpu.arrays.items() if key.startswith(f"{name}/")
        }
        parts.append(tmp_path / f"{kind}.npz")
        runner.save(parts[-1], [result], SIDE)
    joined = runner.Side(parts)
    assert joined.meta["tasks"] == gpu.meta["tasks"]
    assert runner.compare(gpu, joined, WORKSPACE).modules == runner.compare(gpu, gpu, WORKSPACE).modules
    runner.save(parts[0], [result], {**SIDE, "gpu": "another"})
    with pytest.raises(UserError, match="another machine or other versions"):
        runner.Side(parts)


# -- record and document


def _checkout(tmp_path: Path) -> Workspace:
    """A workspace with this checkout's specs, its modules, and a document with nothing in it."""
    (tmp_path / "specs").symlink_to(WORKSPACE.specs_dir)
    (tmp_path / "generated").mkdir()
    for path in WORKSPACE.generated_dir.glob("*.py"):
        (tmp_path / "generated" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "docs").mkdir()
    (tmp_path / comparison.DOCUMENT).write_text(f"before\n{comparison.BEGIN}\n{comparison.END}\nafter\n")
    return Workspace(tmp_path, WORKSPACE.bundled)


def test_a_record_is_read_as_it_was_written_and_rendered(sides: tuple[Path, Path], tmp_path: Path) -> None:
    workspace = _checkout(tmp_path)
    assert comparison.read(workspace) is None
    with pytest.raises(UserError, match="make it with"):
        comparison.page(workspace)
    written = runner.compare(*_compared(sides), WORKSPACE)
    comparison.write(workspace, written)
    read = comparison.read(workspace)
    assert read is not None and [module.stem for module in read.modules] == [STEM]
    text = comparison.page(workspace)
    assert text.startswith(f"before\n{comparison.BEGIN}\n") and text.endswith(f"{comparison.END}\nafter\n")
    assert f"1 of {MODULES} modules of attention to dense tensors were compared as they stand now" in text
    assert f"| `{STEM}` | 0/0 |" in text


def test_a_changed_module_is_stale(sides: tuple[Path, Path], tmp_path: Path) -> None:
    workspace = _checkout(tmp_path)
    comparison.write(workspace, runner.compare(*_compared(sides), WORKSPACE))
    with workspace.module_path(STEM).open("a") as file:
        file.write("# changed\n")
    text = comparison.page(workspace)
    assert f"0 of {MODULES} modules of attention to dense tensors were compared as they stand now" in text
    assert f"`{STEM}`" in text and f"| `{STEM}` |" not in text


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    workspace = _checkout(tmp_path)
    path = comparison.record_path(workspace)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"version": 1, "surprise": 2}))
    with pytest.raises(UserError, match="is not a comparison"):
        comparison.read(workspace)


def test_the_committed_document_is_what_the_committed_record_renders_to() -> None:
    assert comparison.page(WORKSPACE) == (WORKSPACE.root / comparison.DOCUMENT).read_text(encoding="utf-8")


def test_the_committed_record_finds_data_movement_exact() -> None:
    record = comparison.read(WORKSPACE)
    assert record is not None and record.gpu.gpu is not None
    selections = [case for module in record.modules for case in module.cases if case.gpu_wrong is not None]
    families = [Family.of(forward(module.stem)) for module in record.modules]
    capped = sum(family.softcap and not family.any_cap for family in families)
    assert len(selections) == 2 * (len(record.modules) - capped) > 0
    assert all((case.gpu_wrong, case.cpu_wrong) == (0, 0) for case in selections)
    assert all(copy.shared_different == copy.stored_different == 0 for copy in record.copies) and record.copies
    assert all(case.lse.max_relative < 1e-5 for module in record.modules for case in module.cases if case.lse)
