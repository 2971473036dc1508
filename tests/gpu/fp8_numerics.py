"""How far attention in 8 bits is from attention: by inputs, lengths, scales, rotation and levels of sums.

    python tests/gpu/fp8_numerics.py             on a machine with a Hopper GPU, from the root of a checkout
    python tests/gpu/fp8_numerics.py --speeds    speeds of quantising and attention together, over bf16 attention

Prints Markdown tables, as docs/performance.md has them. Errors are relative (Frobenius norm of the difference over that
of what is right), of 256 queries of 4 heads without a mask; "right" is attention in float64 of the tensors before they
were quantised, and beside it of the quantised ones, which leaves what the kernel itself does. Inputs are N(0, 1), or
with outliers, N(0, 1) + N(0, 100) with probability 0.001, as in section 4.3 of the FlashAttention-3 paper (Shah et al.,
arXiv 2407.08608). A needle is a key that one query of each head looks for: its score is that many times the standard
score of the others, and it is found where O is nearer to its value than to that of any other needle.

Scales are of a tensor, of heads, or of Q and K of blocks of 128 rows of a head (V: of heads, or of blocks, too), each
as it is and with Q and K rotated. Those of blocks go through `k8`. A table has a V whose blocks of rows differ: every
other one is 2^-16 of its neighbours, which is nothing in 8 bits with one factor, and queries look for its keys.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import fa3gen  # noqa: E402
from fa3gen.design.family import blocks_of  # noqa: E402
from fa3gen.design.masks import reach  # noqa: E402
from fa3gen.design.workspace import Workspace  # noqa: E402
from fa3gen.hardware.dtypes import E4M3, E5M2  # noqa: E402
from fa3gen.measure.bench import require_hopper  # noqa: E402
from fa3gen.run.launch import module_at  # noqa: E402
from fa3gen.spec.model import NoMask  # noqa: E402
from fa3gen.spec.quantizing import BLOCK_ROWS  # noqa: E402
from fa3gen.verify import reference  # noqa: E402

LARGEST, LARGEST_E5M2 = 448.0, 57344.0  # of e4m3; of e5m2, of which fewer bits are left for a fraction
QUERIES, HEADS = 256, 4
LENGTHS = 1024, 8192, 32768, 131072
NEEDLES = 128
# Modules by head dim, and by the tiles of keys whose P V the tensor core sums before threads add it up in float32: all
# of them, as FlashAttention-3 does, four, or one, as production has it up to head dim 128.
NEVER, EVERY_FOURTH, EVERY = "never", "every 4", "every 1"
MIXED = "every 1, K and V in e5m2"
BLOCKS = "every 1, factors of blocks"
MODULES = {
    (NEVER, 64): "k7_d64",
    (NEVER, 128): "k7_d128",
    (NEVER, 256): "fwd_fp8_d256",
    (EVERY_FOURTH, 128): "k7_promote_4_d128",
    (EVERY, 64): "fwd_fp8_d64",
    (EVERY, 128): "fwd_fp8_d128",
    (EVERY, 256): "fwd_fp8_d256_two_levels",
    (MIXED, 128): "k7_e5m2_d128",
    (BLOCKS, 64): "k8_d64",
    (BLOCKS, 128): "k8_d128",
}
DIMS = 128, 64, 256
DIFFERENT = "V of blocks that differ"


def module(promoted: str, dim: int) -> Callable[..., Any]:
    """The unmasked `attention` of a module for dense tensors."""
    path = Workspace.find(ROOT).generated_dir / f"{MODULES[promoted, dim]}.py"
    entry: Callable[..., Any] = module_at(path).attention
    return entry


def drawn(shape: tuple[int, ...], outliers: bool, generator: torch.Generator) -> torch.Tensor:
    """Inputs in bf16."""
    x = torch.randn(shape, device="cuda", generator=generator)
    if outliers:
        chosen = torch.rand(shape, device="cuda", generator=generator) < 0.001
        x += 10.0 * torch.randn(shape, device="cuda", generator=generator) * chosen
    return x.bfloat16()


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention in float64, (batch, seq_q, heads, d)."""
    return reference.attention(q, k, v, reach=reach(NoMask())).out


def quantised(x: torch.Tensor, per: str, signs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """x in 8 bits and its factors, (1, heads), or of blocks (1, heads, blocks)."""
    if per == "tensor":
        largest = (x if signs is None else reference.rotate(x, signs)).abs().max().float()
        return fa3gen.quantize(x, rotate=signs, descale=(largest / LARGEST).expand(1, x.shape[2]).contiguous())
    return fa3gen.quantize(x, rotate=signs, scale="block" if per == "block" else "head")


def of_rows(factors: torch.Tensor, rows: int) -> torch.Tensor:
    """Factors of heads or of blocks as a tensor (1, rows, heads, d) is multiplied by them, in float64."""
    if factors.dim() == 2:
        return factors.double()[:, None, :, None]
    return factors.double().repeat_interleave(BLOCK_ROWS, 2)[..., :rows].transpose(1, 2)[..., None]


def in_e5m2(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x in e5m2 and its factors, (1, heads): the largest of a head becomes the largest there is."""
    factors = x.abs().amax(dim=(1, 3)).float() / LARGEST_E5M2
    return (x.float() / factors[:, None, :, None]).to(E5M2.in_torch()), factors


def dequantised(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return x.double() * of_rows(factors, x.shape[1])


def relative(found: torch.Tensor, right: torch.Tensor) -> float:
    return ((found.double() - right).norm() / right.norm()).item()


# What is compared: a name, scales, whether Q and K are rotated, and when sums of the tensor core are promoted.
RECIPES = [
    ("one scale for a tensor", "tensor", False, NEVER),
    ("scales of heads, as FA3", "head", False, NEVER),
    ("the same, promoted every 4 tiles of keys", "head", False, EVERY_FOURTH),
    ("scales of heads, two levels", "head", False, EVERY),
    ("the same, rotated", "head", True, EVERY),
    ("one scale for a tensor, rotated, two levels", "tensor", True, EVERY),
    ("scales of blocks of Q and K, two levels", "block", False, BLOCKS),
    ("scales of blocks, rotated (K8)", "block", True, BLOCKS),
    ("scales of blocks, of V, too, rotated", "all blocks", True, BLOCKS),
    ("two levels, K and V in e5m2", "head", False, MIXED),
]


def recipes(dim: int) -> list[tuple[str, str, bool, str]]:
    """Those for which there is a module of this head dim."""
    return [recipe for recipe in RECIPES if (recipe[3], dim) in MODULES]


def outputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, signs: torch.Tensor, recipe: Any) -> Any:
    """O of one recipe, and the quantised tensors as float64."""
    _, per, rotated, promoted = recipe
    turn = signs if rotated else None
    per, of_v = {"block": ("block", "head"), "all blocks": ("block", "block")}.get(per, (per, per))
    if promoted == MIXED:
        (q8, a), (k8, b), (v8, c) = quantised(q, per, turn), in_e5m2(k), in_e5m2(v)
    else:
        (q8, a), (k8, b), (v8, c) = quantised(q, per, turn), quantised(k, per, turn), quantised(v, of_v, None)
    out = module(promoted, q.shape[3])(q8, k8, v8, q_descale=a, k_descale=b, v_descale=c)
    return out, (dequantised(q8, a), dequantised(k8, b), dequantised(v8, c))


def errors(dim: int, generator: torch.Generator) -> None:
    """The tables of one head dim."""
    signs = torch.where(torch.rand(dim, device="cuda", generator=generator) < 0.5, -1.0, 1.0)
    for inputs in ("normal", "outliers", *[DIFFERENT] * ((BLOCKS, dim) in MODULES)):
        outliers = inputs == "outliers"
        print(f"\n| head dim {dim}, {inputs} | " + " | ".join(map(str, LENGTHS)) + " |")
        print("|---" * (len(LENGTHS) + 1) + "|")
        lines: dict[str, list[str]] = {name: [] for name, *_ in recipes(dim)}
        for keys in LENGTHS:
            q = drawn((1, QUERIES, HEADS, dim), outliers, generator)
            k, v = (drawn((1, keys, HEADS, dim), outliers, generator) for _ in range(2))
            if inputs == DIFFERENT:  # queries look for keys whose values are small, of which O then is
                small = torch.arange(keys, device="cuda") // BLOCK_ROWS % 2 == 1
                v[:, small] *= 2.0**-16
                q[..., 0], k[..., 0] = 10.0, torch.where(small, 10.0, -10.0)[:, None]
            right = exact(q, k, v)
            for recipe in recipes(dim):
                out, rounded = outputs(q, k, v, signs, recipe)
                lines[recipe[0]].append(f"{relative(out, right):.4f} ({relative(out, exact(*rounded)):.4f})")
        for name, cells in lines.items():
            print(f"| {name} | " + " | ".join(cells) + " |")


def needles(dim: int, generator: torch.Generator) -> None:
    """How many of the needles are found among 128k keys, and how far O is from the right one."""
    keys = LENGTHS[-1]
    signs = torch.where(torch.rand(dim, device="cuda", generator=generator) < 0.5, -1.0, 1.0)
    strengths = 10.0, 12.0, 14.0
    print(f"\n| needles among {keys} keys, head dim {dim}; score | " + " | ".join(f"{s:g}" for s in strengths) + " |")
    print("|---" * (len(strengths) + 1) + "|")
    lines: dict[str, list[str]] = {name: [] for name in ["float64", *(name for name, *_ in recipes(dim))]}
    for strength in strengths:
        k, v = (drawn((1, keys, HEADS, dim), False, generator) for _ in range(2))
        places = torch.randperm(keys, device="cuda", generator=generator)[:NEEDLES]
        wanted = k[:, places].float()
        q = (wanted / wanted.norm(dim=-1, keepdim=True) * strength).bfloat16()
        right, values = exact(q, k, v), v[:, places].double()

        def found(out: torch.Tensor, values: torch.Tensor = values) -> float:
            nearest = torch.cdist(out[0].double().transpose(0, 1), values[0].transpose(0, 1)).argmin(-1)
            return (nearest == torch.arange(NEEDLES, device="cuda")).double().mean().item()

        lines["float64"].append(f"{found(right):.3f}")
        for recipe in recipes(dim):
            out, _ = outputs(q, k, v, signs, recipe)
            lines[recipe[0]].append(f"{found(out):.3f} ({relative(out, right):.4f})")
    for name, cells in lines.items():
        print(f"| {name} | " + " | ".join(cells) + " |")


def both(
    tensors: Any, into: Any, signs: torch.Tensor | None, causal: bool, out: torch.Tensor, per: Any = "head"
) -> None:
    """Quantise q and k, with scales of heads or of blocks, and v, and attend."""
    pairs = zip(tensors[:2], into[:2], strict=True)
    (q8, a), (k8, b) = (fa3gen.quantize(x, rotate=signs, scale=per, out=o) for x, o in pairs)
    v8, c = fa3gen.quantize(tensors[2], out=into[2])
    fa3gen.attention(q8, k8, v8, causal=causal, q_descale=a, k_descale=b, v_descale=c, out=out)


def ones_of_blocks(tensors: Any) -> dict[str, torch.Tensor]:
    """Factors of blocks of q and of k."""
    shapes = {f"{name}_descale": x.shape for name, x in zip("qk", tensors[:2], strict=True)}
    return {
        name: torch.ones(batch, heads, blocks_of(rows), device="cuda")
        for name, (batch, rows, heads, _) in shapes.items()
    }


def speeds(rounds: int = 9) -> None:
    """Quantising q, k and v and attention in 8 bits, over attention in bf16: one process, CUDA graphs, shuffled."""
    lengths = 2048, 4096, 8192, 16384
    generator = torch.Generator("cuda").manual_seed(3)
    for dim in (128,):
        signs = torch.where(torch.rand(dim, device="cuda", generator=generator) < 0.5, -1.0, 1.0)
        for causal in (False, True):
            print(f"\n| head dim {dim}, {'causal' if causal else 'full'} | " + " | ".join(map(str, lengths)) + " |")
            print("|---" * (len(lengths) + 1) + "|")
            lines: dict[str, list[str]] = {}
            for seq in lengths:
                shape = 16384 // seq, seq, 2048 // dim, dim
                q, k, v = (torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(3))
                eight = [x.to(E4M3.in_torch()) for x in (q, k, v)]
                out, ones = torch.empty_like(q), ones_of_blocks(eight)
                calls: dict[str, Callable[[], Any]] = {
                    "bf16": lambda q=q, k=k, v=v, c=causal, o=out: fa3gen.attention(q, k, v, causal=c, out=o),
                    "8 bits": lambda e=eight, c=causal, o=out: fa3gen.attention(*e, causal=c, out=o),
                    "quantised, 8 bits": lambda t=(q, k, v), e=eight, c=causal, o=out: both(t, e, None, c, o),
                    "quantised, rotated, 8 bits": lambda t=(q, k, v), e=eight, c=causal, o=out, s=signs: both(
                        t, e, s, c, o
                    ),
                    "8 bits, blocks": lambda e=eight, c=causal, o=out, f=ones: fa3gen.attention(
                        *e, causal=c, **f, out=o
                    ),
                    "quantised by blocks, rotated, 8 bits": lambda t=(q, k, v), e=eight, c=causal, o=out, s=signs: both(
                        t, e, s, c, o, "block"
                    ),
                }
                took = timed(calls, rounds)
                for name, time in took.items():
                    lines.setdefault(name, []).append(
                        f"{took['bf16'] / time:.2f}" if name != "bf16" else f"{time:.3f} ms"
                    )
            for name, cells in lines.items():
                print(f"| {name} | " + " | ".join(cells) + " |")


def timed(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Milliseconds of each, the median of shuffled rounds of graphs that hold it several times."""
    graphs, times = {}, {name: [] for name in calls}
    for name, call in calls.items():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(5):
                call()
        graphs[name] = graph
    for _ in range(rounds):
        for place in torch.randperm(len(graphs)).tolist():
            name = list(graphs)[place]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[name].replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / 5)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speeds", action="store_true", help="speeds in place of errors")
    asked = parser.parse_args()
    print(torch.cuda.get_device_name(require_hopper()))
    if asked.speeds:
        speeds()
        return
    generator = torch.Generator("cuda").manual_seed(7)
    for dim in DIMS:
        errors(dim, generator)
    needles(128, generator)


if __name__ == "__main__":
    main()
