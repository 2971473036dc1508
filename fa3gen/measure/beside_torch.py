"""Modules of operations other than attention, beside what torch does: `copy_`, a product by cuBLAS, passes over x.

That is `torch.mm`, and of 8-bit operands `torch._scaled_mm` with scales of one: with `use_fast_accum` beside modules of
one level of sums, without it beside those of two. All four take turns.

Calls are replayed from CUDA graphs, so that no host side is measured, in rounds, in each of which all competitors of a
problem take turns in a random order. A ratio is the median over rounds of the two times of one round: the clock of a
GPU under its power limit wanders by more than kernels differ. Inputs are normal random numbers, of copies random bits.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fa3gen.design import boxes, gemm
from fa3gen.design.operation import Tensor, operation_of
from fa3gen.hardware import hopper
from fa3gen.records.evidence import Speed
from fa3gen.spec.model import Combine, Copy, Gemm, Other, Quantize

if TYPE_CHECKING:
    import torch

ROUNDS = 12
BURST_MS = 15.0  # of one timing: as many launches as fill it
CUBES = (4096, 8192)  # m = n = k
COPIED_BYTES = 5 * 2**28  # of x, at most: 1.34 GB, far more than the L2 holds
INNER = (4, 8, 512)  # dimensions between the first and the row, as many of the last as a tensor has
SEQUENCE_ROWS = 2000  # of a packed sequence, on average
PARTS = (2, 8, 32)  # that are merged
MERGED = ((32, 1, 32, 128), (1, 4096, 16, 128))  # O of them: batch, seq, heads, head dim; of a decode and a prefill
QUANTIZED = ((2, 16384, 16), (32, 4096, 8))  # batch, seq, heads; of rows of 128 elements 134 and 268 MB
SEED = 0


@dataclass(frozen=True)
class Problem:
    """Tensors of one call, and how much work it is: `amount` in the unit's units for each second."""

    name: str
    amount: float
    unit: Literal["TFLOP/s", "GB/s"]
    given: tuple[torch.Tensor, ...]
    out: torch.Tensor


class Burst(Protocol):
    """How calls are timed: `fa3gen.measure.tuning.measuring.CudaTimer`; made up in tests."""

    def once(self, launch: Callable[[], Any]) -> float:
        """Milliseconds of one call."""

    def burst(self, launch: Callable[[], Any], count: int) -> tuple[Callable[[], float], bool]:
        """A function that makes `count` calls from a CUDA graph and returns milliseconds per call."""


def problems(spec: Other, device: torch.device) -> list[Callable[[], Problem]]:
    """What modules of this spec are timed at; the tensors are made when a problem is."""
    match spec:
        case Gemm():
            return [functools.partial(_cube, spec, size, device) for size in CUBES]
        case Copy():
            return [functools.partial(_large, spec, device)]
        case Combine():
            return [functools.partial(_merge, spec, shape, parts, device) for shape in MERGED for parts in PARTS]
        case Quantize():
            return [functools.partial(_rows, spec, shape, device) for shape in QUANTIZED]


def _cube(spec: Gemm, size: int, device: torch.device) -> Problem:
    """D = A B (+ C) of square matrices, each contiguous as the module wants it."""
    import torch

    operation = operation_of(spec)
    generator = torch.Generator(device=device).manual_seed(SEED)
    given = tuple(_matrix(tensor, size, device, generator) for tensor in operation.inputs)
    out = _matrix(operation.output, size, device, generator)
    return Problem(f"{size} x {size} x {size}", 2 * size**3 / 1e12, "TFLOP/s", given, out)


def _large(spec: Copy, device: torch.device) -> Problem:
    """A tensor of COPIED_BYTES, without gaps; packed rows in sequences of random lengths."""
    import torch

    generator, row = torch.Generator(device=device).manual_seed(SEED), spec.problem.row
    inner = INNER[len(INNER) + 2 - len(spec.box.extents) :]
    rows = COPIED_BYTES // (row * spec.element.bytes * math.prod(inner))
    shape = (rows, *inner, row)
    bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device, generator=generator)
    x = bits.view(spec.element.in_torch())
    offsets: tuple[torch.Tensor, ...] = ()
    if boxes.packed(spec):
        cuts = torch.randint(0, rows, (rows // SEQUENCE_ROWS,), device=device, generator=generator).sort().values
        offsets = (torch.nn.functional.pad(cuts, (1, 0)).int(),)
        offsets[0][-1] = rows
    out = torch.empty_like(x)
    name = " x ".join(map(str, shape))
    return Problem(name, 2 * x.numel() * x.element_size() / 1e9, "GB/s", (x, *offsets), out)


def _merge(spec: Combine, shape: tuple[int, ...], parts: int, device: torch.device) -> Problem:
    """Parts without gaps, and LSE as the decode modules leave them, in which queries are contiguous."""
    import torch

    generator = torch.Generator(device=device).manual_seed(SEED)
    values = torch.randn((parts, *shape), device=device, generator=generator)
    batch, seq, heads, _ = shape
    lse = torch.randn((parts, batch, heads, seq), device=device, generator=generator).transpose(2, 3)
    out = torch.empty(shape, dtype=spec.element.in_torch(), device=device)
    moved = sum(x.numel() * x.element_size() for x in (values, lse, lse[0], out))
    return Problem(f"{parts} parts of {' x '.join(map(str, shape))}", moved / 1e9, "GB/s", (values, lse), out)


def _rows(spec: Quantize, shape: tuple[int, ...], device: torch.device) -> Problem:
    """Rows without gaps. The work is to read x once and to write the output, however often x is read."""
    import torch

    operation = operation_of(spec)
    generator = torch.Generator(device=device).manual_seed(SEED)
    sizes = *shape, spec.problem.head_dim
    x = torch.randn(sizes, device=device, generator=generator).to(spec.element.in_torch())
    signs = torch.randint(0, 2, sizes[-1:], device=device, generator=generator) * 2.0 - 1.0
    made = torch.empty_strided(sizes, operation.output.strides(sizes), dtype=spec.out_element.in_torch(), device=device)
    moved = sum(each.numel() * each.element_size() for each in (x, made))
    given = (x, signs) if spec.problem.rotate else (x,)
    return Problem(" x ".join(map(str, sizes)), moved / 1e9, "GB/s", given, made)


def _quantized_by_torch(spec: Quantize, problem: Problem) -> torch.Tensor:
    """A quantisation in torch's operators: rotated by a product, with scales of heads, blocks or rows."""
    import torch

    x, *signs = problem.given
    if signs:
        x = (x * signs[0].to(x.dtype)) @ _hadamard(x.shape[-1], x.dtype, x.device)
    largest = x.abs()
    if spec.problem.scale == "block":
        batch, seq, heads, size = x.shape
        blocks = largest.reshape(batch, seq // spec.tile.rows, spec.tile.rows, heads, size).amax((2, 4))
        largest = blocks.repeat_interleave(spec.tile.rows, 1)[..., None]
    else:
        largest = largest.amax((1, 3) if spec.problem.scale == "head" else 3, keepdim=True)
    descale: torch.Tensor = largest.float() / torch.finfo(problem.out.dtype).max
    problem.out.copy_(x / descale)
    return descale


@functools.cache
def _hadamard(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Sylvester's Hadamard matrix over the square root of its size."""
    from fa3gen.verify import reference

    return (reference.hadamard(size) / math.sqrt(size)).to(device, dtype)


def _merged_by_torch(values: torch.Tensor, lses: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """A merge in torch's operators, for parts that all have keys."""
    import torch

    lse = torch.logsumexp(lses, dim=0)
    out.copy_((torch.exp(lses - lse)[..., None] * values).sum(0))
    return lse


def _matrix(tensor: Tensor, size: int, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    import torch

    values = torch.randn((size, size), device=device, generator=generator).to(tensor.dtype.in_torch())
    return values.t() if tensor.layout.contiguous == 0 else values


def torchs_call(spec: Other, problem: Problem) -> tuple[str, Callable[[], Any]]:
    """(name, call) of what torch does instead of a module of this spec."""
    import torch

    if isinstance(spec, Copy):
        return "copy_", lambda: problem.out.copy_(problem.given[0])
    if isinstance(spec, Combine):
        values, lses = problem.given
        return "logsumexp, exp, mul, sum", functools.partial(_merged_by_torch, values, lses, problem.out)
    if isinstance(spec, Quantize):
        return "abs, amax, div, copy_", functools.partial(_quantized_by_torch, spec, problem)
    (a, b, *c), dtype = problem.given, problem.out.dtype
    if spec.element.bytes < hopper.BYTES_16BIT:
        fast, one = not gemm.two_levels(spec), torch.ones((), device=a.device)
        scaled = functools.partial(torch._scaled_mm, a, b, one, one, out_dtype=dtype, use_fast_accum=fast)
        return f"_scaled_mm, use_fast_accum={fast}", scaled
    wide: list[Any] = [] if dtype == a.dtype else [dtype]
    name = "addmm" if c else "mm"
    return name, functools.partial(getattr(torch, name), *c, a, b, *wide)


def speeds(
    modules: Mapping[str, tuple[Other, Any]],
    device: torch.device,
    timer: Burst,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, Speed]]:
    """Time (spec, module) by stem; a `Speed` by stem and name of the problem.

    Modules that work on the same tensors take turns with each other and with torch.
    """
    groups: dict[Any, list[str]] = {}
    for stem, (spec, _) in modules.items():
        groups.setdefault(operation_of(spec).tensors, []).append(stem)
    found: dict[str, dict[str, Speed]] = {stem: {} for stem in modules}
    for stems in groups.values():
        entries = {stem: operation_of(modules[stem][0]).entry_of(modules[stem][1]) for stem in stems}
        for make in problems(modules[stems[0]][0], device):
            problem = make()
            say(f"{problem.name}: {', '.join(stems)}")
            calls: dict[str, Callable[[], Any]] = {
                stem: functools.partial(_last_output, entry, problem) for stem, entry in entries.items()
            }
            peers = {stem: torchs_call(modules[stem][0], problem) for stem in stems}
            calls |= {name: call for name, call in dict(peers.values()).items() if _works(call)}
            rounds = _rounds(calls, timer)
            for stem, (peer, _) in peers.items():
                found[stem][problem.name] = _speed(problem, rounds[stem], rounds.get(peer))
    return found


def _last_output(entry: Callable[..., Any], problem: Problem) -> Any:
    """Call a module; of several outputs the last one, LSE or scales, by which a timer sees that a graph wrote it."""
    returned = entry(*problem.given, out=problem.out)
    return returned[-1] if isinstance(returned, tuple) else returned


def _rounds(calls: Mapping[str, Callable[[], Any]], timer: Burst) -> dict[str, list[float]]:
    """Milliseconds of each call by its name, in each round."""
    runs: dict[str, Callable[[], float]] = {}
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        call()  # loads the kernel
        count = max(1, math.ceil(BURST_MS / max(timer.once(call), 1e-3)))
        runs[name], _ = timer.burst(call, count)
    order, chance = list(calls), random.Random(SEED)
    for _ in range(ROUNDS):
        chance.shuffle(order)
        for name in order:
            rounds[name].append(runs[name]())
    return rounds


def _works(call: Callable[[], Any]) -> bool:
    """Whether torch has it: older versions have no product of 16-bit matrices into float32."""
    try:
        call()
    except (NotImplementedError, TypeError):
        return False
    return True


def _speed(problem: Problem, own: Sequence[float], torchs: Sequence[float] | None) -> Speed:
    rate = problem.amount / (statistics.median(own) / 1e3)
    ratios = None if torchs is None else [theirs / ours for theirs, ours in zip(torchs, own, strict=True)]
    return Speed(rate=rate, unit=problem.unit, of_torch=None if ratios is None else statistics.median(ratios))
