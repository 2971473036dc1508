"""The speeds that users of packed, paged and cached calls ask for, each beside who else serves it: tables, no record.

    python tests/gpu/asked_speeds.py [SECTION...] [--drawn N] [--seed S] [--list]    with a Hopper GPU, from a checkout

times calls of fa3gen as users make them, FlashAttention-3 where it is installed, and cuDNN where it serves them, for 8
bits with the package nvidia-cudnn-frontend, from CUDA graphs in rounds of shuffled order, in one process. Sections:
packed, paged, windows, decode, mixed, cache8, fp8, quantised and quantised_short, where tensors of 16 bits are made 8
bits first, and five of calls at random, the same ones for a seed: drawn, of serving engines (drafts, chunks of prompts,
chunks beside steps), drawn8, the same with 8 bits, steps and prompts, too, drawnwindows8, these with windows,
drawncache8, with keys of 8 bits beside queries of 16, and prompts (dense, packed, with windows). First all modules that
the calls take are compiled, as many at once as there are cores; --list ends
behind that. A line for each call has microseconds, and the ratios of speeds that the section is about; behind them come
geometric means, the least, and how many are below what is asked.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cudnn_eight_bits import attention_by_cudnn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import fa3gen  # noqa: E402
from fa3gen.compile.cache import cached_compile_for_launch  # noqa: E402
from fa3gen.design.family import Family, PackedShape  # noqa: E402
from fa3gen.design.masks import reach  # noqa: E402
from fa3gen.measure import packed_cells  # noqa: E402
from fa3gen.measure.bench import require_hopper  # noqa: E402
from fa3gen.measure.packed_speeds import Inputs  # noqa: E402
from fa3gen.measure.peers import PEERS, PackedCall, Unavailable  # noqa: E402
from fa3gen.measure.tuning.measuring import CudaTimer, in_turns  # noqa: E402
from fa3gen.records.packed_records import PackedProblem  # noqa: E402
from fa3gen.run.eight_bits import FACTORS  # noqa: E402
from fa3gen.spec.model import CausalMask, Mask, NoMask, WindowMask  # noqa: E402
from fa3gen.verify import reference  # noqa: E402

DEVICE = torch.device("cuda")
BURST_MS, ROUNDS, SEED = 6.0, 7, 0
OWN_TOLERANCE = 0.005  # of O in 16 bits, by the reference
EIGHT_BIT_TOLERANCE = 0.1  # of O by a peer where P has 8 bits, or K and V, or cuDNN's O
OURS, CUDNN, FA3 = "fa3gen", "cuDNN", "FA3"
NARROW, WIDE = "8 bits", "16 bits"  # fa3gen with keys of either
DECODING = [
    *((1, keys, heads) for keys in (4096, 32768, 131072) for heads in ((32, 8), (8, 1), (16, 16))),
    *((8, keys, heads) for keys in (4096, 32768) for heads in ((32, 8), (8, 1), (16, 16))),
    *((32, keys, heads) for keys in (4096, 16384) for heads in ((32, 8), (8, 1), (16, 16))),
    *((128, keys, heads) for keys in (2048, 8192) for heads in ((32, 8), (8, 1), (16, 16))),
]  # sequences of one query, keys, heads of q and of k and v
# Head dims, and query heads and heads of k and v, as models have them; and those of prompts without groups.
MODELS = ((64, 64, 8), (64, 20, 5), (128, 32, 8), (128, 40, 8), (128, 64, 8), (128, 28, 4), (128, 96, 8), (256, 16, 8))
# What calls of serving engines consist of: the first three are drawn in 16 bits, all of them in 8.
KINDS = ("drafts", "chunks", "steps and a chunk", "steps", "prompts")
ALONE = ((64, 16, 16), (128, 16, 16), (128, 32, 32), (256, 8, 8))
MOST_TOKENS, MOST_SCORES = 65_536, 2**37  # of a drawn prompt's call; scores of all heads, times the head dim

Tensors = Iterable[torch.Tensor]


@dataclass(frozen=True)
class Way:
    """A way to compute a cell: the launch, what `explain` says of ours, and how far its O is from the reference's."""

    launch: Callable[[], torch.Tensor]
    explain: Callable[[], Any] | None = None
    error: Callable[[torch.Tensor], float] | None = None


@dataclass(frozen=True)
class Ratio:
    """The speed of one way over that of the fastest of others, and what is asked of it."""

    title: str
    own: str
    others: tuple[str, ...]
    asked: float


@dataclass(frozen=True)
class Section:
    """Calls that one table shows. `tolerance`: how far from ours, by the norm, a peer's O is by rounding alone."""

    ways: tuple[str, ...]
    ratios: tuple[Ratio, ...]
    cells: Callable[[argparse.Namespace], Iterator[tuple[str, Callable[[], dict[str, Way]]]]]
    tolerance: float = 0.03


# Calls


def mask_of(causal: bool, window: tuple[int, int] | None = None) -> Mask:
    """That of a call."""
    if window is not None:
        return WindowMask(left=window[0], right=window[1])
    return CausalMask() if causal else NoMask()


def of_peer(name: str, mask: Mask, *tensors: Any) -> dict[str, Way]:
    """The way of FA3 or cuDNN, of q, k and v or of a packed call; none where it is not installed."""
    known = {CUDNN: "cuDNN", FA3: "flash-attn-3"}
    peer = next(one for one in PEERS if one.name.startswith(known[name]))
    try:
        attend = peer.prepare(mask) if len(tensors) > 1 else peer.prepare_packed(mask)
    except Unavailable:
        return {}
    return {name: Way(functools.partial(attend, *tensors))}


def of_cudnn(tensors: Sequence[torch.Tensor], causal: bool) -> dict[str, Way]:
    """That of cuDNN for q, k and v of 8 bits, planned by the first launch; none where its frontend is not installed."""
    if importlib.util.find_spec("cudnn") is None:
        return {}
    planned = functools.cache(lambda: attention_by_cudnn(*tensors, causal=causal))
    return {CUDNN: Way(lambda: planned()())}


def ours(function: Any, *tensors: Any, **options: Any) -> Way:
    """A function of fa3gen, with an O of its own."""
    dtype = torch.bfloat16 if tensors[0].dtype == torch.float8_e4m3fn else tensors[0].dtype
    out = torch.full_like(tensors[0], math.nan, dtype=dtype)
    call = functools.partial(function, *tensors, out=out, **options)
    return Way(call, functools.partial(function.explain, *tensors, out=out, **options))


def packed_ways(problem: PackedProblem, **options: Any) -> dict[str, Way]:
    """A packed or paged call by fa3gen and by FA3, which may split keys of pages as it likes."""
    mask, window = problem.mask.spec_mask(), problem.window
    inputs = Inputs.of(problem, DEVICE)
    call = inputs.call
    named: dict[str, Any] = {"max_seqlen_q": call.max_seqlen_q, "max_seqlen_k": call.max_seqlen_k, **options}
    named |= {"window": window} if window is not None else {"causal": isinstance(mask, CausalMask)}
    own = of_fa3gen(call, **named)
    if problem.kv_dtype is not None:
        return {OURS: own}
    q, k, v, *_ = inputs.wide
    lengths_q, lengths_k = list(problem.lengths_q), list(problem.lengths_k)
    error = functools.partial(error_of, q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), mask)
    return {OURS: replace(own, error=lambda out: error(out.split(lengths_q)))} | of_peer(FA3, mask, call)


def beside_16_bits(problem: PackedProblem) -> dict[str, Way]:
    """A call with keys of 8 bits, and the same with keys of 16, which FA3 takes, too."""
    wide = packed_ways(problem.model_copy(update={"kv_dtype": None}))
    return {NARROW: packed_ways(problem)[OURS], WIDE: wide.pop(OURS)} | wide


def error_of(qs: Tensors, ks: Tensors, vs: Tensors, mask: Mask, outs: Tensors) -> float:
    """The relative error of O by the reference, of sequences (seq, heads, d), a head at a time."""
    wrong = right = 0.0
    for q, k, v, out in zip(qs, ks, vs, outs, strict=True):
        for head in range(q.shape[1]):
            own = head * k.shape[1] // q.shape[1]
            one = (x[None, :, at : at + 1] for x, at in ((q, head), (k, own), (v, own)))
            expected = reference.attention(*one, reach=reach(mask), compute_dtype=torch.float32).out[0, :, 0]
            wrong += (out[:, head] - expected).square().sum().item()
            right += expected.square().sum().item()
    return math.sqrt(wrong / right)


def of_fa3gen(call: PackedCall, **options: Any) -> Way:
    """A call of `fa3gen.attention_packed`."""
    where = {"page_table": call.page_table, "seqused_k": call.seqused_k}
    where = where if call.page_table is not None else {"cu_seqlens_k": call.cu_seqlens_k}
    return ours(fa3gen.attention_packed, call.q, call.k, call.v, call.cu_seqlens_q, **where, **options)


def problem_of(
    name: str,
    lengths: tuple[Sequence[int], Sequence[int]],
    heads: tuple[int, int],
    head_dim: int,
    mask: Mask,
    page: int | None = None,
    window: tuple[int, int] | None = None,
    kv_dtype: Any = None,
    dtype: Any = "bf16",
) -> PackedProblem:
    """A problem of queries of a dtype, and of keys of the same one or of another."""
    layout: Any = "packed" if page is None else "paged"
    mask = mask if window is None else WindowMask()
    family = Family(dtype, head_dim, head_dim, mask, layout=layout, page_rows=page, kv_dtype=kv_dtype)
    return PackedProblem.of(family, name, PackedShape(*map(tuple, lengths), *heads, window=window))


def dense(shape: tuple[int, int, int], heads: tuple[int, int], head_dim: int) -> tuple[torch.Tensor, ...]:
    """q, k and v of (batch, queries, keys)."""
    torch.manual_seed(SEED)
    batch, seq_q, seq_k = shape
    sizes = ((seq_q, heads[0]), *[(seq_k, heads[1])] * 2)
    return tuple(torch.randn((batch, seq, n, head_dim), dtype=torch.bfloat16, device=DEVICE) for seq, n in sizes)


def dense_ways(tensors: Sequence[torch.Tensor], mask: Mask) -> dict[str, Way]:
    """A dense call by fa3gen and by FA3."""
    windowed = isinstance(mask, WindowMask)
    named = {"window": (mask.left, mask.right)} if windowed else {"causal": isinstance(mask, CausalMask)}
    own = replace(ours(fa3gen.attention, *tensors, **named), error=functools.partial(error_of, *tensors, mask))
    return {OURS: own} | of_peer(FA3, mask, *tensors)


# Sections

Cells = Iterator[tuple[str, Callable[[], dict[str, Way]]]]


def packed(_: argparse.Namespace) -> Cells:
    """Chats and documents."""
    for name in ("chat16k", "chat64k", "documents64k"):
        for head_dim, heads in ((128, (32, 8)), (64, (16, 16))):
            for causal in (True, False):
                lengths = packed_cells.PACKED_LENGTHS[name]
                problem = problem_of(name, lengths, heads, head_dim, mask_of(causal))
                label = f"{name} d{head_dim} {heads[0]}/{heads[1]} {'causal' if causal else 'full'}"
                yield label, functools.partial(packed_ways, problem)


def paged(_: argparse.Namespace) -> Cells:
    """Prompts that are partly in the cache, and such that are not, in pages, and the same dense."""
    for page in (1, 16, 64, 256):
        for name, (batch, seq_q, seq_k) in (("8 x 1024 on 8192", (8, 1024, 8192)), ("4 x 4096", (4, 4096, 4096))):
            problem = problem_of("_", ((seq_q,) * batch, (seq_k,) * batch), (32, 8), 128, CausalMask(), page)

            def ways(problem: PackedProblem = problem, shape: Any = (batch, seq_q, seq_k)) -> dict[str, Way]:
                return packed_ways(problem) | {
                    "dense": ours(fa3gen.attention, *dense(shape, (32, 8), 128), causal=True)
                }

            yield f"{name}, pages of {page}", ways


def windows(_: argparse.Namespace) -> Cells:
    """Windows given with the call."""
    for head_dim, heads in ((64, (64, 16)), (128, (32, 8)), (256, (8, 4))):
        for left in (128, 512, 1024, 4096):
            for batch, seq in ((4, 4096), (1, 16384)):
                label = f"d{head_dim} window {left}, {batch} x {seq}"

                def of_dense(
                    shape: Any = (batch, seq, seq), heads: Any = heads, d: int = head_dim, left: int = left
                ) -> Any:
                    return dense_ways(dense(shape, heads, d), WindowMask(left=left, right=0))

                yield f"{label}, dense", of_dense
                lengths = ((seq,) * batch,) * 2
                problem = problem_of("_", lengths, heads, head_dim, NoMask(), window=(left, 0))
                yield f"{label}, packed", functools.partial(packed_ways, problem)


def decode(_: argparse.Namespace) -> Cells:
    """One query each: dense, packed, in pages, and with the bits of a sequence alone."""
    for batch, keys, heads in DECODING:

        def ways(batch: int = batch, keys: int = keys, heads: Any = heads) -> dict[str, Way]:
            tensors = dense((batch, 1, keys), heads, 128)
            found = {
                "dense": ours(fa3gen.attention, *tensors),
                "own": ours(fa3gen.attention, *tensors, deterministic_batch=True),
            }
            found |= of_peer(CUDNN, NoMask(), *tensors)
            for page in (None, 16, 256):
                both = packed_ways(problem_of("_", ((1,) * batch, (keys,) * batch), heads, 128, NoMask(), page))
                found["packed" if page is None else f"pages {page}"] = both[OURS]
                if page is not None and FA3 in both:
                    found[f"{FA3} {page}"] = both[FA3]
            return found

        yield f"{batch} x {keys}, {heads[0]}/{heads[1]}", ways


def mixed(_: argparse.Namespace) -> Cells:
    """A chunk of a prompt beside decoding steps."""
    for name, lengths in packed_cells.MIXED_LENGTHS.items():
        for page in (16, 64, 256):
            problem = problem_of(name, lengths, (32, 8), 128, CausalMask(), page)
            yield f"{name}, pages of {page}", functools.partial(packed_ways, problem)


def cache8(_: argparse.Namespace) -> Cells:
    """Keys of 8 bits beside the same call with keys of 16."""
    for head_dim, heads in (
        (64, (64, 8)),
        (64, (16, 16)),
        (128, (32, 8)),
        (128, (16, 16)),
        (256, (16, 4)),
        (256, (8, 8)),
    ):
        for name in packed_cells.DECODING_LENGTHS:
            lengths = packed_cells.DECODING_LENGTHS[name]

            problem = problem_of(name, lengths, heads, head_dim, CausalMask(), 16, kv_dtype="e4m3")
            yield f"d{head_dim} {heads[0]}/{heads[1]} {name}", functools.partial(beside_16_bits, problem)


def fp8(_: argparse.Namespace) -> Cells:
    """Queries, keys and values of 8 bits, 16,384 tokens in all, heads x head dim 2048."""
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            for seq in (512, 1024, 2048, 4096, 8192, 16384):

                def ways(d: int = head_dim, causal: bool = causal, seq: int = seq) -> dict[str, Way]:
                    wide = dense((16384 // seq, seq, seq), (2048 // d, 2048 // d), d)
                    tensors = [x.to(torch.float8_e4m3fn) for x in wide]
                    found = {OURS: ours(fa3gen.attention, *tensors, causal=causal)} | of_cudnn(tensors, causal)
                    return found | of_peer(FA3, mask_of(causal), *tensors)

                yield f"d{head_dim} {'causal' if causal else 'full'} {seq}", ways


def made_8_bits(tensors: Sequence[torch.Tensor], causal: bool, *, scales: str) -> dict[str, Way]:
    """Attention of tensors of 16 bits that are made 8 bits before, V transposed, its keys permuted; and that alone.

    Scales of heads are "given", those of the step before, or "found", which takes a kernel more for each tensor.
    """
    how: tuple[dict[str, Any], ...] = ({}, {}, {"transpose": True, "permute_keys": True})
    made = [fa3gen.quantize(x, **options) for x, options in zip(tensors, how, strict=True)]
    factors = {name: factor for name, (_, factor) in zip(FACTORS, made, strict=True)}
    attend = ours(fa3gen.attention, *(x for x, _ in made), **factors, v_permuted=True, causal=causal)

    def launch() -> torch.Tensor:
        for x, (out, factor), options in zip(tensors, made, how, strict=True):
            fa3gen.quantize(x, descale=factor if scales == "given" else None, out=out, **options)
        return attend.launch()

    return {scales: replace(attend, launch=launch), NARROW: attend}


def quantised(_: argparse.Namespace, cells: Sequence[tuple[bool, int]]) -> Cells:
    """Tensors of 16 bits as they are, and made 8 bits first: 16,384 tokens, 16 heads of 128."""
    for causal, seq in cells:

        def ways(causal: bool = causal, seq: int = seq) -> dict[str, Way]:
            tensors = dense((16384 // seq, seq, seq), (16, 16), 128)
            found = {WIDE: ours(fa3gen.attention, *tensors, causal=causal)}
            return found | made_8_bits(tensors, causal, scales="given") | made_8_bits(tensors, causal, scales="found")

        yield f"{'causal' if causal else 'full'} {seq}", ways


def drawn_heads(at: random.Random, models: Sequence[tuple[int, int, int]]) -> tuple[int, tuple[int, int]]:
    """Head dim and heads of a model, divided among GPUs."""
    head_dim, heads_q, heads_kv = at.choice(models)
    parts = at.choice([n for n in (1, 2, 4, 8) if heads_kv % n == 0])
    return head_dim, (heads_q // parts, heads_kv // parts)


def drawn(
    asked: argparse.Namespace,
    kinds: Sequence[str] = KINDS[:3],
    ways: Callable[[PackedProblem], dict[str, Way]] = packed_ways,
    *,
    windows: bool = False,
    **dtypes: Any,
) -> Cells:
    """Calls at random: heads of a model, divided among GPUs, and what an engine's step has; perhaps with windows."""
    for number in range(asked.drawn):
        at = random.Random(asked.seed * 1_000_000 + number)
        head_dim, heads = drawn_heads(at, MODELS)
        kind = kinds[number % len(kinds)]
        longest = 2 ** at.uniform(10, 15)
        if kind == "drafts":
            queries = [at.choice((2, 3, 4, 5, 6, 8, 12, 16))] * at.choice((1, 2, 4, 8, 16, 32, 64))
        elif kind == "chunks":
            queries = packed_cells.drawn_chunks(at)
        elif kind == "steps and a chunk":
            queries = packed_cells.drawn_steps(at)
        elif kind == "steps":
            queries = [1] * at.choice((1, 2, 4, 8, 16, 32, 64, 128))
        else:
            queries = [int(longest * 2 ** at.uniform(-4, 0)) for _ in range(at.choice((1, 2, 4, 8)))]
        keys = queries if kind == "prompts" else packed_cells.drawn_keys(at, queries, longest)
        page = None if kind == "prompts" else at.choice((16, 32, 64, 128))
        window = (int(2 ** at.uniform(6, 12)), 0) if windows else None
        problem = problem_of("_", (queries, keys), heads, head_dim, CausalMask(), page, window, **dtypes)
        label = f"{kind}: {len(queries)} of up to {max(queries)} on {min(keys)} to {max(keys)}"
        where = "packed" if page is None else f"pages of {page}"
        where += f", window {window[0]}" if window else ""
        yield f"{label}, d{head_dim} {heads[0]}/{heads[1]}, {where}", functools.partial(ways, problem)


def prompts(asked: argparse.Namespace) -> Cells:
    """Prompts at random: equally long and dense, on as many keys or on more; packed, of any lengths; with windows."""
    for number in range(asked.drawn):
        at = random.Random(asked.seed * 1_000_000 + number)
        head_dim, heads = drawn_heads(at, (*MODELS, *ALONE))
        kind, causal, more = ("dense", "packed", "windows")[number % 3], at.random() < 0.7, at.random() < 0.3
        longest = int(2 ** at.uniform(7, 14))
        most = min(MOST_TOKENS // longest, MOST_SCORES // (longest**2 * heads[0] * head_dim)) or 1
        batch = at.choice([n for n in (1, 2, 3, 4, 8, 16, 32, 64) if n <= most])
        window = (int(2 ** at.uniform(6, 12)), 0) if kind == "windows" else None
        keys = int(longest * 2 ** at.uniform(0, 3)) if more else longest
        mask, shown = mask_of(causal, window), f"window {window[0]}" if window else "causal" if causal else "full"
        label = f"{kind}: {batch} x {longest} on {keys}, d{head_dim} {heads[0]}/{heads[1]}, {shown}"
        if kind == "packed" or (window and number % 2):
            queries = [max(1, int(longest * 2 ** at.uniform(-5, 0))) for _ in range(batch)] if batch > 1 else [longest]
            lengths = queries, [seq_q * keys // longest for seq_q in queries]
            problem = problem_of("_", lengths, heads, head_dim, mask, window=window)
            yield f"{label}, packed", functools.partial(packed_ways, problem)
            continue

        def ways(
            shape: Any = (batch, longest, keys), heads: Any = heads, d: int = head_dim, mask: Mask = mask
        ) -> dict[str, Way]:
            tensors = dense(shape, heads, d)
            # torch's causal mask begins at the first key, ours ends at the last one.
            alike = isinstance(mask, NoMask) or (isinstance(mask, CausalMask) and shape[1] == shape[2])
            return dense_ways(tensors, mask) | (of_peer(CUDNN, mask, *tensors) if alike else {})

        yield label, ways


_OVER_FA3 = OURS, (FA3,)
_MADE = WIDE, "given", "found", NARROW
SECTIONS = {
    "packed": Section((OURS, FA3), (Ratio("over FA3", *_OVER_FA3, 1.10),), packed),
    "paged": Section(
        (OURS, FA3, "dense"), (Ratio("over FA3", *_OVER_FA3, 1.05), Ratio("over dense", OURS, ("dense",), 0.95)), paged
    ),
    "windows": Section((OURS, FA3), (Ratio("over FA3", *_OVER_FA3, 1.05),), windows),
    "decode": Section(
        ("dense", CUDNN, f"{FA3} 16", f"{FA3} 256", "packed", "pages 16", "pages 256", "own"),
        (
            Ratio("over the best", "dense", (CUDNN, f"{FA3} 16", f"{FA3} 256"), 0.97),
            Ratio("packed over dense", "packed", ("dense",), 0.95),
            Ratio("pages of 16 over packed", "pages 16", ("packed",), 0.95),
            Ratio("pages of 256 over packed", "pages 256", ("packed",), 0.95),
            Ratio("own bits over free", "own", ("dense",), 0.9),
        ),
        decode,
    ),
    "mixed": Section((OURS, FA3), (Ratio("over FA3", *_OVER_FA3, 1.25),), mixed),
    "cache8": Section(
        (NARROW, WIDE, FA3), (Ratio("8 over 16 bits", NARROW, (WIDE,), 1.6),), cache8, EIGHT_BIT_TOLERANCE
    ),
    "fp8": Section(
        (OURS, CUDNN, FA3),
        (Ratio("over the best", OURS, (CUDNN, FA3), 1.0), Ratio("over FA3", *_OVER_FA3, 1.0)),
        fp8,
        EIGHT_BIT_TOLERANCE,
    ),
    "quantised": Section(
        _MADE,
        tuple(Ratio(f"{way} over 16 bits", way, (WIDE,), 1.25) for way in _MADE[1:]),
        functools.partial(quantised, cells=((False, 8192), (False, 16384), (True, 16384))),
        EIGHT_BIT_TOLERANCE,
    ),
    "quantised_short": Section(
        _MADE,
        tuple(Ratio(f"{way} over 16 bits", way, (WIDE,), 1.1) for way in _MADE[1:]),
        functools.partial(quantised, cells=((False, 4096), (True, 8192))),
        EIGHT_BIT_TOLERANCE,
    ),
    "drawn": Section((OURS, FA3), (Ratio("over FA3", *_OVER_FA3, 0.9),), drawn),
    "drawn8": Section(
        (OURS, FA3),
        (Ratio("over FA3", *_OVER_FA3, 0.9),),
        functools.partial(drawn, kinds=KINDS, dtype="e4m3"),
        EIGHT_BIT_TOLERANCE,
    ),
    "drawnwindows8": Section(
        (OURS, FA3),
        (Ratio("over FA3", *_OVER_FA3, 0.9),),
        functools.partial(drawn, kinds=KINDS, windows=True, dtype="e4m3"),
        EIGHT_BIT_TOLERANCE,
    ),
    "drawncache8": Section(
        (NARROW, WIDE, FA3),
        (Ratio("8 over 16 bits", NARROW, (WIDE,), 0.9), Ratio("over FA3", NARROW, (FA3,), 0.9)),
        functools.partial(drawn, kinds=KINDS, ways=beside_16_bits, kv_dtype="e4m3"),
        EIGHT_BIT_TOLERANCE,
    ),
    "prompts": Section((OURS, FA3, CUDNN), (Ratio("over the best", OURS, (FA3, CUDNN), 0.9),), prompts),
}


# Running


def compile_all(asked: argparse.Namespace) -> None:
    """Compile every module that a call of the sections takes, as many at once as there are cores."""
    files = set()
    for name in asked.sections:
        for _, make in SECTIONS[name].cells(asked):
            files |= {way.explain().file for way in make().values() if way.explain is not None}
    started = time.monotonic()
    with ThreadPoolExecutor() as pool:
        list(pool.map(cached_compile_for_launch, sorted(files)))
    print(f"{len(files)} modules compiled in {time.monotonic() - started:.0f} s", flush=True)


def microseconds(ways: dict[str, Way], device: torch.device) -> dict[str, float]:
    """The median time of each way."""
    timer, runs = CudaTimer(device), dict[str, Callable[[], float]]()
    for name, way in ways.items():
        way.launch()
        runs[name], captured = timer.burst(way.launch, max(1, math.ceil(BURST_MS / timer.once(way.launch))))
        assert captured or name == CUDNN, name
    return {name: statistics.median(times) * 1e3 for name, times in in_turns(runs, ROUNDS).items()}


def check_alike(ways: dict[str, Way], label: str, tolerance: float) -> list[str]:
    """The names of the peers whose O differs from that of the first way by more than rounding does.

    Raises AssertionError unless that of the first way is right then by the reference, as far as it is asked.
    """
    (_, own), *peers = ways.items()
    out = own.launch()
    wide = out.flatten().float()
    differing = [
        name for name, way in peers if not (way.launch().flatten().float() - wide).norm() <= tolerance * wide.norm()
    ]
    assert not differing or (own.error is not None and own.error(out) <= OWN_TOLERANCE), f"{label}: {differing}"
    return differing


def measure(name: str, asked: argparse.Namespace, device: torch.device) -> None:
    """Print the table of a section, and what its ratios come to."""
    section = SECTIONS[name]
    print(f"\n## {name}, {torch.cuda.get_device_name(device)}\n")
    print(
        f"| call | {' | '.join(f'{way}, us' for way in section.ways)} | {' | '.join(r.title for r in section.ratios)} |"
    )
    print("|---" * (1 + len(section.ways) + len(section.ratios)) + "|", flush=True)
    found: dict[str, dict[str, list[float]]] = {ratio.title: {} for ratio in section.ratios}
    for label, make in section.cells(asked):
        ways = make()
        if name != "decode":  # of other numbers in pages
            differing = check_alike({way: ways[way] for way in ways if way != "dense"}, label, section.tolerance)
            label += "".join(f" ({peer} computes something else)" for peer in differing)
        took, shown = microseconds(ways, device), []
        for ratio in section.ratios:
            others = [took[other] for other in ratio.others if other in took]
            value = min(others) / took[ratio.own] if others else math.nan
            shown.append(f"{value:.3f}")
            found[ratio.title].setdefault(label.split(":")[0] if ":" in label else "", []).append(value)
        times = (f"{took[way]:.1f}" if way in took else "" for way in section.ways)
        print(f"| {label} | {' | '.join(times)} | {' | '.join(shown)} |", flush=True)
    print()
    for ratio in section.ratios:
        for kind, values in found[ratio.title].items():
            mean = math.exp(statistics.mean(map(math.log, values)))
            below = sum(value < ratio.asked for value in values)
            head = f"{name} {kind}: {ratio.title}"
            print(
                f"{head}: {mean:.3f}, least {min(values):.3f}, {below} of {len(values)} below {ratio.asked}", flush=True
            )


def main() -> None:
    """Compile, measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("sections", nargs="*", help="those to measure; all if none is named", metavar="SECTION")
    parser.add_argument("--drawn", type=int, default=60, help="calls of each section at random")
    parser.add_argument("--seed", type=int, default=0, help="of these calls")
    parser.add_argument("--list", action="store_true", help="compile, and time nothing")
    asked = parser.parse_args()
    asked.sections = asked.sections or list(SECTIONS)
    if unknown := set(asked.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    device = require_hopper("tests/gpu/asked_speeds.py")
    compile_all(asked)
    for name in () if asked.list else asked.sections:
        measure(name, asked, device)


if __name__ == "__main__":
    main()
