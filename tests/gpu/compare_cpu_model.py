"""Runs the CPU model of sm_90a and a real Hopper GPU on the same inputs; see fa3gen/verify/comparison.py.

    python tests/gpu/compare_cpu_model.py run --on gpu --out gpu.npz     on a machine with a Hopper GPU
    python tests/gpu/compare_cpu_model.py run --on cpu --out cpu.npz     anywhere; minutes
    python tests/gpu/compare_cpu_model.py compare --gpu gpu.npz --cpu cpu.npz    writes the record and docs/cpu_model.md
    python tests/gpu/compare_cpu_model.py sums --gpu gpu.npz     writes data for tests/cpu/test_tensor_core.py

`fa3gen refresh` writes docs/cpu_model.md anew from the record.

All of them from the root of a checkout. `--only WORD` (repeatable) keeps the runs whose name contains a WORD.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "tests" / "gpu")) if path not in sys.path]

from fa3gen.base import files  # noqa: E402
from fa3gen.base.errors import UserError  # noqa: E402
from fa3gen.compile.loading import clean_argv, load_file  # noqa: E402
from fa3gen.design import ladder  # noqa: E402
from fa3gen.design.masks import options_of_call  # noqa: E402
from fa3gen.design.workspace import Workspace  # noqa: E402
from fa3gen.hardware.chips import H200  # noqa: E402
from fa3gen.hardware.dtypes import DTYPES  # noqa: E402
from fa3gen.run.launch import load_for_launch  # noqa: E402

On = Literal["gpu", "cpu"]
Arrays = dict[str, NDArray[Any]]
PROBES = ("wgmma", "tma")
KINDS = ("module", *PROBES)
GPU_JOBS = 8  # processes; each compiles for itself and has a CUDA context of its own


@dataclass(frozen=True)
class Task:
    """One module, or one variant of a probe."""

    kind: str
    name: str


@dataclass
class Result:
    """What one task gave: arrays by their name, digests of the inputs, the hash of the source; or the error."""

    task: Task
    arrays: Arrays = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    source_sha256: str = ""
    error: str | None = None


def probe(kind: str) -> Any:
    """The module of a probe; importing it imports the DSL."""
    with clean_argv():
        return __import__(f"{kind}_probe")


def tasks(only: Sequence[str] = ()) -> list[Task]:
    """Everything there is to run, whose name contains one of `only`."""
    from fa3gen.verify import comparison

    workspace = Workspace.find(ROOT)
    stems = (stem for stem in ladder.attention_stems(workspace) if comparison.is_dense(workspace, stem))
    found = [Task("module", stem) for stem in stems]
    found += [Task(kind, variant.name) for kind in PROBES for variant in probe(kind).VARIANTS]
    return [task for task in found if not only or any(word in f"{task.kind}/{task.name}" for word in only)]


# -- one task


def perform(task: Task, on: On) -> Result:
    """Run one task; what goes wrong is part of the result, so that it costs no other task."""
    try:
        return {"module": run_module, "wgmma": run_product, "tma": run_copies}[task.kind](task, on)
    except Exception:
        return Result(task, error=traceback.format_exc())


def run_module(task: Task, on: On) -> Result:
    """`attention` of a generated module on all cases, O poisoned beforehand."""
    import torch

    import fa3gen
    from fa3gen.verify import comparison

    workspace = Workspace.find(ROOT)
    (variant,) = workspace.resolve(task.name)
    spec, path = variant.spec, workspace.module_path(task.name)
    module: Any = load_for_launch(path) if on == "gpu" else fa3gen.load(task.name, on="cpu")
    if on == "cpu":
        module.cpu.settings = as_on_a_gpu(spec)
    result = Result(task, source_sha256=files.sha256(path))
    for case in (comparison.served(case, spec) for case in comparison.CASES):
        inputs = comparison.make_for(spec, case)
        result.inputs[case.name] = comparison.digest((inputs.q, inputs.k, inputs.v))
        q, k, v = (moved(tensor, on) for tensor in (inputs.q, inputs.k, inputs.v))
        options = {"return_lse": True} if spec.outputs.lse else {}
        dtype = DTYPES[spec.o_dtype].in_torch()
        out = torch.full((*q.shape[:-1], v.shape[-1]), float("nan"), dtype=dtype, device=q.device)
        named = {
            name: value.to(device(on)) if isinstance(value, torch.Tensor) else value
            for name, value in inputs.keywords.items()
        }
        given = module.attention(q, k, v, out=out, **options_of_call(spec.mask), **named, **options)
        out, lse = given if spec.outputs.lse else (given, None)
        result.arrays[f"{case.name}/out"] = comparison.bits_of(out)
        if lse is not None:
            result.arrays[f"{case.name}/lse"] = comparison.bits_of(lse)
    return result


def as_on_a_gpu(spec: Any) -> Any:
    """Work divided among as many SMs, by which sums come in another order; products of 8 bits as they lose bits there.

    Those of 16 bits lose few, and summing them as the tensor core does takes many times as long.
    """
    from fa3gen.cpu.kernel import Settings

    return Settings(sms=H200.sms, sums="tensor_core" if spec.element.bytes == 1 else "float32")


def moved(tensor: Any, on: On) -> Any:
    """A tensor on the device of one side, with its strides: `.to` leaves out what lies between rows."""
    import torch

    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device(on))
    return made.copy_(tensor)


def device(on: On) -> Any:
    """The torch device of one side."""
    import torch

    return torch.device("cuda" if on == "gpu" else "cpu")


def compiled_probe(kind: str, variant: Any, on: On, folder: Path) -> tuple[Any, str]:
    """(a function of tensors, hash of the source) of a probe's variant; `folder` has to outlive the function."""
    path = folder / f"{kind}_{variant.name}.py"
    path.write_text(probe(kind).source(variant), encoding="utf-8")
    if on == "gpu":
        function = load_file(path).compile_for_sm90a()
    else:
        from fa3gen.compile.cache import cached_compile
        from fa3gen.cpu.kernel import CpuKernel, Settings

        function = CpuKernel(cached_compile(path), Settings(sums="tensor_core"))
    return function, files.sha256(path)


def run_product(task: Task, on: On) -> Result:
    """One WGMMA product, on each set of operands."""
    import torch

    from fa3gen.verify import comparison

    variant = next(variant for variant in probe("wgmma").VARIANTS if variant.name == task.name)
    result = Result(task)
    with tempfile.TemporaryDirectory() as folder:
        function, result.source_sha256 = compiled_probe("wgmma", variant, on, Path(folder))
        for operands, (a, b) in product_operands(variant).items():
            result.inputs[operands] = comparison.digest((a, b))
            d = torch.full((a.shape[0], b.shape[0]), float("nan"), device=device(on))
            function(*(tensor.view(_bits(tensor)).to(d.device) for tensor in (a, b)), d)
            result.arrays[f"{operands}/d"] = comparison.bits_of(d)
    return result


def _bits(tensor: Any) -> Any:
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]


def product_operands(variant: Any) -> dict[str, tuple[Any, Any]]:
    """A (64, k) and B (n, k) in their types, by the name of the set.

    "special": rows of A that hold an infinity (NaN in e4m3, which has none), both infinities, a NaN, and nothing but
    the smallest subnormal number; row 4 has elements of all sizes. One row of B is so large that products with
    subnormal numbers are normal float32 numbers, or nearly so.
    """
    import torch

    types = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    random = np.random.default_rng([variant.n, variant.k])
    a = torch.from_numpy(random.standard_normal((64, variant.k)))
    b = torch.from_numpy(random.standard_normal((variant.n, variant.k)))
    a_type, b_type = types[variant.a_type], types[variant.b_type]
    sets = {"normal": (a.to(a_type), b.to(b_type))}
    special_a, special_b = a.clone(), b.clone()
    special_a[4] *= torch.exp2(torch.from_numpy(random.integers(-8, 8, variant.k)).double())
    special_b[0] = 2.0**100 if variant.b_type == "bf16" else 256.0
    a16 = special_a.to(a_type)
    has_infinity = variant.a_type != "e4m3"
    infinity = float("inf") if has_infinity else float("nan")
    a16[0, 5], a16[1, 3], a16[1, 40], a16[2, 7] = infinity, infinity, -infinity, float("nan")
    a16.view(_bits(a16))[3] = 1  # the smallest subnormal number of every format
    sets["special"] = (a16, special_b.to(b_type))
    return sets


def copy_places(variant: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Coordinates of (load, store): inside; before the first and past the last element along every dimension.

    Along the contiguous dimension a box begins at a multiple of 16 bytes: anywhere else, in a load as in a store, the
    GPU stops with an illegal instruction.
    """
    step = 16 // probe("tma").BYTES[variant.element]
    steps = (step, *(1 for _ in variant.extents[1:]))
    sizes = tuple(zip(variant.extents, variant.box, steps, strict=True))
    past = tuple((extent - max(1, box // 2)) // step * step for extent, box, step in sizes)
    before = (-step, *(-min(1 + dimension, box - 1) for dimension, box in enumerate(variant.box[1:], 1)))
    inside = tuple(max(0, min(step, (extent - box) // step * step)) for extent, box, step in sizes)
    return [((0,) * variant.rank, inside), (before, past), (past, inside)]


def copy_tensors(variant: Any) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Random bytes of source and destination as they lie in memory, (dimensions slowest first, bytes of an element)."""
    random = np.random.default_rng([variant.rank, variant.swizzle, *variant.box])
    width = probe("tma").BYTES[variant.element]
    shape = (*reversed(variant.memory), width)
    return random.integers(0, 256, shape, np.uint8), random.integers(0, 256, shape, np.uint8)


def copy_memory(variant: Any, data: NDArray[np.uint8]) -> Any:
    """Bytes as elements, with what lies between rows."""
    import torch

    types = {"u8": torch.uint8, "bf16": torch.bfloat16, "f32": torch.float32}
    return torch.from_numpy(data.copy()).view(types[variant.element]).squeeze(-1)


def copy_argument(variant: Any, memory: Any) -> Any:
    """The tensor that the probe takes, which lies in `copy_memory`: its extents, its order of dimensions."""
    inside = memory[..., : variant.extents[0]]
    return inside.permute(probe("tma").dsl_order(tuple(reversed(range(variant.rank)))))


def run_copies(task: Task, on: On) -> Result:
    """One TMA box, loaded and stored at each pair of places."""
    import torch

    from fa3gen.verify import comparison

    variant = next(variant for variant in probe("tma").VARIANTS if variant.name == task.name)
    result = Result(task)
    with tempfile.TemporaryDirectory() as folder:
        function, result.source_sha256 = compiled_probe("tma", variant, on, Path(folder))
        for number, places in enumerate(copy_places(variant)):
            source, target = copy_tensors(variant)
            x, y = (copy_memory(variant, data).to(device(on)) for data in (source, target))
            image = torch.zeros(variant.box_bytes, dtype=torch.uint8, device=x.device)
            starts = torch.tensor(places, dtype=torch.int32, device=x.device)
            result.inputs[str(number)] = hashlib.sha256(
                source.tobytes() + target.tobytes() + repr(places).encode()
            ).hexdigest()
            function(copy_argument(variant, x), copy_argument(variant, y), image, starts)
            result.arrays[f"{number}/shared"] = comparison.bits_of(image)
            result.arrays[f"{number}/stored"] = y.cpu().view(torch.uint8).numpy()
    return result


# -- one side


def run_side(on: On, wanted: Sequence[Task], jobs: int) -> Iterator[Result]:
    """Run tasks, each kind in processes of its own: a probe that breaks the GPU's context comes after the modules."""
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    for kind in KINDS:
        chosen = [task for task in wanted if task.kind == kind]
        if jobs == 1 and on == "cpu":
            yield from (perform(task, on) for task in chosen)
        elif chosen:
            with ProcessPoolExecutor(min(jobs, len(chosen)), multiprocessing.get_context("spawn")) as pool:
                for future in as_completed([pool.submit(perform, task, on) for task in chosen]):
                    yield future.result()


def surroundings(on: On) -> dict[str, Any]:
    """What a side ran with, as the record has it; only compiling a module tells which ptxas that is."""
    from fa3gen.compile.compiler import compile_module
    from fa3gen.run import gpu

    workspace = Workspace.find(ROOT)
    ptxas = compile_module(workspace.module_path("k4_2_d64")).ptxas
    around = asdict(gpu.environment(ptxas))
    return around if on == "gpu" else {**around, "gpu": None, "driver": None, "cuda_driver": None}


def save(path: Path, results: Sequence[Result], around: dict[str, Any]) -> None:
    """Write one side's results into one file."""
    meta = {
        "side": around,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "tasks": {
            _key(result.task): {
                "source_sha256": result.source_sha256,
                "inputs": result.inputs,
                "error": result.error,
            }
            for result in results
        },
    }
    arrays = {f"{_key(result.task)}/{name}": array for result in results for name, array in result.arrays.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **{"meta": np.array(json.dumps(meta)), **arrays})  # type: ignore[arg-type]


def run(on: On, out: Path, only: Sequence[str], jobs: int) -> int:
    """Run one side and write its file, also where some tasks failed; returns how many did."""
    started = time.perf_counter()
    around = surroundings(on)
    results: list[Result] = []
    wanted = tasks(only)
    if not wanted:
        raise UserError(f"no module and no probe has a name with {' or '.join(only)} in it")
    for result in run_side(on, wanted, jobs):
        results.append(result)
        state = "" if result.error is None else "  FAILED: " + result.error.strip().splitlines()[-1]
        taken = time.perf_counter() - started
        print(f"{taken:6.1f} s  {len(results)}/{len(wanted)}  {result.task.kind}/{result.task.name}{state}", flush=True)
        if len(results) == len(wanted) or wanted[len(results)].kind != wanted[len(results) - 1].kind:
            save(out, results, around)
    for result in results:
        if result.error is not None:
            print(f"\n{result.task.kind}/{result.task.name}\n{result.error}")
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")
    return sum(result.error is not None for result in results)


# -- both sides


class Side:
    """One side's files, read back as one."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """What later files hold replaces what earlier ones do.

        Raises UserError when one is not there, or when they were not made on one machine with the same versions.
        """
        self.arrays: Arrays = {}
        self.meta: dict[str, Any] = {}
        for path in paths:
            if not path.exists():
                raise UserError(f"{path} does not exist; write it with `{Path(__file__).name} run`")
            with np.load(path) as arrays:
                meta = json.loads(str(arrays["meta"]))
                self.arrays |= {name: arrays[name] for name in arrays.files if name != "meta"}
            if self.meta and meta["side"] != self.meta["side"]:
                raise UserError(f"{path} was made on another machine or other versions than {paths[0]}; run all again")
            self.meta = {**meta, "tasks": {**self.meta.get("tasks", {}), **meta["tasks"]}}

    def of(self, task: str, part: str) -> Arrays:
        """The arrays of one part of one task, by their last name."""
        prefix = f"{task}/{part}/"
        return {name.removeprefix(prefix): array for name, array in self.arrays.items() if name.startswith(prefix)}


def compare(gpu: Side, cpu: Side, workspace: Workspace) -> Any:
    """The comparison of two sides: of everything that the GPU ran.

    Raises UserError when a task failed on one side, is missing on the CPU's, or had another source or other inputs.
    """
    from fa3gen.verify import comparison

    for task, on_gpu in gpu.meta["tasks"].items():
        on_cpu = cpu.meta["tasks"].get(task)
        if on_cpu is None:
            raise UserError(f"{task} was not run on the CPU; run that side again without --only")
        for name, facts in (("GPU", on_gpu), ("CPU", on_cpu)):
            if facts["error"]:
                raise UserError(f"{task} failed on the {name}: {facts['error'].strip().splitlines()[-1]}")
        for what in ("source_sha256", "inputs"):
            if on_gpu[what] != on_cpu[what]:
                raise UserError(f"{task}: {what} of the two sides differ; run both again from the same checkout")
    order = [task for task in map(_key, tasks()) if task in gpu.meta["tasks"]]
    return comparison.Comparison(
        date=gpu.meta["date"],
        seed=comparison.SEED,
        gpu=comparison.Side(**gpu.meta["side"]),
        cpu=comparison.Side(**cpu.meta["side"]),
        modules=[_module(task, gpu, cpu, workspace) for task in order if task.startswith("module/")],
        products=[part for task in order if task.startswith("wgmma/") for part in _products(task, gpu, cpu)],
        copies=[part for task in order if task.startswith("tma/") for part in _copies(task, gpu, cpu)],
    )


def _key(task: Task) -> str:
    return f"{task.kind}/{task.name}"


def _module(task: str, gpu: Side, cpu: Side, workspace: Workspace) -> Any:
    from fa3gen.verify import comparison

    stem = task.removeprefix("module/")
    (variant,) = workspace.resolve(stem)
    return comparison.ModuleResult(
        stem=stem,
        source_sha256=gpu.meta["tasks"][task]["source_sha256"],
        cases=[
            comparison.compare_case(case, variant.spec, gpu.of(task, case.name), cpu.of(task, case.name))
            for case in comparison.CASES
        ],
    )


def _products(task: str, gpu: Side, cpu: Side) -> Iterator[Any]:
    from fa3gen.verify import comparison

    variant = next(variant for variant in probe("wgmma").VARIANTS if f"wgmma/{variant.name}" == task)
    depth = 16 if variant.wide else 32
    for operands, (a, b) in product_operands(variant).items():
        on_gpu, on_cpu = gpu.of(task, operands)["d"], cpu.of(task, operands)["d"]
        gpu_error, cpu_error, largest = comparison.product_errors(on_gpu, on_cpu, a, b)
        yield comparison.ProductResult(
            name=variant.name,
            operands=operands,
            types=f"{variant.accumulator}.{variant.a_type}.{variant.b_type}",
            shape=f"m64n{variant.n}k{depth}",
            depth=variant.k,
            a_layout=variant.a_layout,
            b_layout=variant.b_layout,
            d=comparison.difference(on_gpu, on_cpu, "fp32"),
            gpu_error=gpu_error,
            cpu_error=cpu_error,
            largest=largest,
        )


def _copies(task: str, gpu: Side, cpu: Side) -> Iterator[Any]:
    from fa3gen.verify import comparison

    variant = next(variant for variant in probe("tma").VARIANTS if f"tma/{variant.name}" == task)
    for number, (load_at, store_at) in enumerate(copy_places(variant)):
        on_gpu, on_cpu = gpu.of(task, str(number)), cpu.of(task, str(number))
        yield comparison.CopyResult(
            name=variant.name,
            swizzle=variant.swizzle,
            extents=list(variant.extents),
            box=list(variant.box),
            load_at=list(load_at),
            store_at=list(store_at),
            bytes=variant.box_bytes,
            shared_different=int((on_gpu["shared"] != on_cpu["shared"]).sum()),
            stored_different=int((on_gpu["stored"] != on_cpu["stored"]).sum()),
        )


def write_sums(gpu: Side) -> Path:
    """A few rows of A, columns of B and elements of D for each pair of types, as the GPU computed them."""
    found: dict[str, Any] = {"gpu": gpu.meta["side"]["gpu"], "date": gpu.meta["date"], "products": []}
    kinds: set[tuple[str, ...]] = set()
    for variant in probe("wgmma").VARIANTS:
        kind = variant.a_type, variant.b_type, variant.accumulator
        if kind in kinds or variant.n < 64:
            continue
        kinds.add(kind)
        for operands, (a, b) in product_operands(variant).items():
            d = gpu.arrays[f"wgmma/{variant.name}/{operands}/d"].view(np.uint32)
            rows, columns = slice(0, 5) if operands == "special" else slice(8, 10), slice(3)
            a_bits, b_bits = (tensor.view(_bits(tensor)).numpy() for tensor in (a[rows], b[columns]))
            found["products"].append(
                {"types": kind, "operands": operands, "a": _hex(a_bits), "b": _hex(b_bits), "d": _hex(d[rows, columns])}
            )
    path = ROOT / "tests" / "data" / "tensor_core_sums.json"
    files.write_text(path, json.dumps(found, indent=1) + "\n")
    return path


def _hex(bits: NDArray[Any]) -> list[str]:
    """A string for each row, in memory's order."""
    return [np.ascontiguousarray(row).tobytes().hex() for row in bits]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="run one side")
    runs.add_argument("--on", choices=("gpu", "cpu"), required=True)
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--only", action="append", default=[])
    runs.add_argument("--jobs", type=int, default=None)
    compares = commands.add_parser("compare", help="write the record and the document")
    compares.add_argument("--gpu", type=Path, nargs="+", required=True)
    compares.add_argument("--cpu", type=Path, nargs="+", required=True)
    sums = commands.add_parser("sums", help="write sums of products as the GPU computed them, for a test")
    sums.add_argument("--gpu", type=Path, nargs="+", required=True)
    options = parser.parse_args()
    if options.command == "run":
        jobs = options.jobs or (GPU_JOBS if options.on == "gpu" else 1)
        return 1 if run(options.on, options.out, options.only, jobs) else 0
    if options.command == "sums":
        print(write_sums(Side(options.gpu)))
        return 0
    from fa3gen.inspect import pages
    from fa3gen.verify import comparison

    workspace = Workspace.find(ROOT)
    try:
        print(comparison.write(workspace, compare(Side(options.gpu), Side(options.cpu), workspace)))
        print(*pages.refresh(workspace), sep="\n")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
