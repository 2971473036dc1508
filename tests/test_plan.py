"""Plans: derived numbers against numbers derived by hand, and the header's tables against the code below them."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
from functools import cache
from typing import Any, TypeGuard

import pytest
from rendering import (
    CHECKOUT,
    STEMS,
    attention_stems,
    changed,
    constants,
    plans,
    samples,
    source,
    tree,
    variants,
    walked,
)

from fa3gen.design import rules
from fa3gen.design.footprint import tma_boxes
from fa3gen.design.operation import operation_of
from fa3gen.generate.expected import SassExpectation
from fa3gen.generate.plan import LayoutPlan, MaskPlan, Plan, SchedulerPlan, SmemPlan, SoftmaxPlan, make_plan
from fa3gen.generate.render import render_variant
from fa3gen.spec.model import Forward, Gemm, Scheduler
from fa3gen.spec.specfile import Variant

BYTES = {"cutlass.Float32": 4, "cutlass.Int32": 4, "cutlass.Int64": 8}
# Tiles of the ladder are square; these are not, so that rows of Q and of K cannot be taken for each other.
UNEVEN: dict[str, tuple[str, dict[str, Any]]] = {
    "uneven_k2": ("k2_d128", {"kv": 32}),
    "uneven_k2_cp_async": ("k2_cp_async_d64", {"kv": 128}),
    "uneven_k3_2": ("k3_2_d64_causal", {"kv": 32}),
    "uneven_k4_1": ("k4_1_d128", {"kv": 32}),
    "uneven_k4_smem": ("k4_smem_d64", {"kv": 192}),
    "uneven_k4_2": ("k4_2_d64", {"q": 192, "warpgroups": 3, "kv": 112}),
    "uneven_k5": ("k5_d128_causal", {"q": 64, "warpgroups": 1, "kv": 112}),
    "uneven_k6": ("k6_d64", {"q": 128, "warpgroups": 2, "kv": 176}),
    "uneven_fwd": ("fwd_d64", {"q": 128, "warpgroups": 2, "kv": 176}),
    "uneven_fwd_dynamic": ("fwd_d96_causal", {"q": 128, "warpgroups": 2, "kv": 80}),
}
ATTENTION = attention_stems()
FUSED = [stem for stem in ATTENTION if not stem.startswith("k1_")] + list(UNEVEN)
TMA = [stem for stem in FUSED if "k2" not in stem]
SPECIALIZED = [stem for stem in FUSED if any(part in stem for part in ("k5", "k6", "k7", "k8", "fwd"))]


@cache
def plan(stem: str) -> Plan:
    if stem in UNEVEN or stem in samples():
        return make_plan(uneven(stem) if stem in UNEVEN else samples()[stem])
    return plans()[stem]


@cache
def code(stem: str) -> ast.Module:
    """The committed module, or the rendered one."""
    return ast.parse(render_variant(uneven(stem), CHECKOUT)) if stem in UNEVEN else tree(stem)


def uneven(name: str) -> Variant:
    stem, tile = UNEVEN[name]
    variant = changed(stem, tile=tile)
    assert rules.check(variant.spec) == []
    return variant


def test_a_plan_is_frozen() -> None:
    for part in (plan("k4_2_d128"), plan("k4_2_d128").smem, plan("k4_2_d128").header):
        field = dataclasses.fields(part)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, field, None)


# Parts


@pytest.mark.parametrize(
    ("stem", "mask", "phrase"),
    [
        ("k4_2_d128", MaskPlan("none", 0, 0, full_tiles="all", both_edges=False), "no mask"),
        ("k1_d64_causal", MaskPlan("causal", 0, 0, full_tiles="before", both_edges=False), "causal"),
        (
            "k4_2_window_d64_window200_70",
            MaskPlan("window", 200, 70, full_tiles="between", both_edges=True),
            "sliding window",
        ),
        # 128 rows see 512 + 2 - 128 = 386 keys in common, more than a tile of 128.
        ("fwd_d128_window", MaskPlan("window", 512, 0, full_tiles="between", both_edges=False), "sliding window"),
    ],
)
def test_mask(stem: str, mask: MaskPlan, phrase: str) -> None:
    assert plan(stem).mask == mask
    assert plan(stem).entry.mask_phrase == phrase


@pytest.mark.parametrize(
    ("stem", "sentence"),
    [
        ("k4_2_d128", "Every query sees every key."),
        (
            "k4_2_d128_causal",
            "Causal: query i sees keys j <= i + seq_k - seq_q; the diagonal ends in the bottom right corner.",
        ),
        (
            "k4_2_window_d64_window200_70",
            "Sliding window: query i sees keys j with -200 <= j - (i + seq_k - seq_q) <= 70.",
        ),
    ],
)
def test_mask_sentence(stem: str, sentence: str) -> None:
    assert plan(stem).header.sentence == sentence


@pytest.mark.parametrize(
    ("tile", "left", "right", "full_tiles", "both_edges"),
    [
        # Row 0 sees keys up to right, row 127 those from 127 - left on: 128 keys from there end at right when
        # left + right = 254.
        ({}, 254, 0, "between", False),
        ({}, 253, 0, "none", True),
        ({}, 150, 104, "between", False),
        # The last row sees 127 + 1 keys up to the last one: as many as a tile with the end of the keys holds.
        ({}, 127, 200, "between", False),
        ({}, 126, 200, "between", True),
        # 4 heads of 32 positions each: 158 + 0 + 2 - 32 = 128.
        ({"pack_heads": 4}, 158, 0, "between", False),
        ({"pack_heads": 4}, 157, 0, "none", True),
    ],
)
def test_tiles_without_an_edge_of_the_window(
    tile: dict[str, Any], left: int, right: int, full_tiles: str, both_edges: bool
) -> None:
    """Where they are depends on the reach of the window, and on how many positions and keys a tile has."""
    mask = make_plan(changed("fwd_d128_window", tile=tile, mask={"kind": "window", "left": left, "right": right})).mask
    assert (mask.full_tiles, mask.both_edges) == (full_tiles, both_edges)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("pack", [1, 2, 8])
@pytest.mark.parametrize("right", [0, 1, 70, 200])
def test_each_edge_of_a_window_is_masked(pack: int, right: int, given: bool) -> None:
    """The loops that the plan of a window chooses visit each tile of keys that is seen, once, and mask its edges."""
    rows, keys = 128 // pack, 128
    for left in (0, 1, 57, 58, 59, 125, 126, 127, 128, 183, 184, 185, 253, 254, 255, 300):
        sides = {"left": None, "right": None} if given else {"left": left, "right": right}
        window = {"kind": "window", **sides}
        mask = make_plan(changed("fwd_d128_window", tile={"pack_heads": pack}, mask=window)).mask
        assert mask.given is given
        for seq_q, seq_k in itertools.product((1, 100, 128, 300), (1, 127, 128, 129, 255, 256, 384, 500)):
            for m_start in range(0, seq_q, rows):
                first = m_start + seq_k - seq_q  # the diagonals of the tile's first and last row
                last = min(m_start + rows, seq_q) - 1 + seq_k - seq_q
                masked = masked_edges(mask, (left, right), first, rows, keys, seq_k)
                for n_block in range(-(-seq_k // keys)):
                    start, end = n_block * keys, n_block * keys + keys - 1
                    if n_block not in masked:  # none of its keys is seen
                        assert start > last + right or end < first - left
                        continue
                    left_edge, right_edge = masked[n_block]
                    assert left_edge or start >= last - left, (left, seq_q, seq_k, m_start, n_block)
                    assert right_edge or end <= min(first + right, seq_k - 1), (left, seq_q, seq_k, m_start, n_block)


def masked_edges(
    mask: MaskPlan, window: tuple[int, int], diagonal: int, rows: int, keys: int, seq_k: int
) -> dict[int, tuple[bool, bool]]:
    """Tile of keys -> whether its left and right edge are masked; as `kv_range` and `consume` of such a module go."""
    left, right = window
    key_end = min(seq_k, max(diagonal + rows + right, 1))
    n_begin, n_end = min(key_end, max(diagonal - left, 0)) // keys, -(-key_end // keys)
    n_full_begin = -(-max(diagonal + rows - 1 - left, 0) // keys)
    n_full_end = min(seq_k, max(diagonal + right + 1, 0)) // keys
    if mask.given:
        n_full_begin = min(n_full_begin, n_full_end)

    def both(n_block: int) -> tuple[bool, bool]:
        """What `mask_scores` masks."""
        return mask.both_edges or (mask.given and n_block * keys < diagonal + rows - 1 - left), True

    if mask.full_tiles == "none":
        return {n_block: both(n_block) for n_block in range(n_begin, n_end)}
    visits = [(n_block, both(n_block)) for n_block in (n_end - 1, *range(n_end - 2, n_full_end - 1, -1))]
    visits += [(n_block, (False, False)) for n_block in range(n_full_begin, min(n_end - 1, n_full_end))]
    visits += [(n_block, (True, False)) for n_block in range(n_begin, min(n_end - 1, n_full_begin))]
    assert len(dict(visits)) == len(visits)
    return dict(visits)


def test_dtype_names() -> None:
    problem = plan("k4_2_d64").problem
    assert (problem.head_dim, problem.cutlass_dtype, problem.torch_dtype) == (64, "BFloat16", "torch.bfloat16")
    problem = plan("k4_2_fp16_d64").problem
    assert (problem.head_dim, problem.cutlass_dtype, problem.torch_dtype) == (64, "Float16", "torch.float16")


@pytest.mark.parametrize(
    ("swizzle", "k_major", "mn_major"),
    [("none", "K_INTER", "MN_INTER"), ("32B", "K_SW32", "MN_SW32"), ("64B", "K_SW64", "MN_SW64")],
)
def test_layout_atoms(swizzle: str, k_major: str, mn_major: str) -> None:
    smem = make_plan(changed("k4_2_d128", smem={"q": swizzle, "k": swizzle, "v": swizzle})).smem
    assert atoms(smem) == {"q": k_major, "k": k_major, "v": mn_major}
    smem = make_plan(changed("k2_d128", smem={"q": swizzle, "k": swizzle, "v": swizzle})).smem
    # To scalar products, which know no core matrices, no swizzle means rows one below the other.
    assert atoms(smem) == dict.fromkeys("qkv", "" if swizzle == "none" else k_major)
    smem = make_plan(changed("k4_1_d64", smem={"q": swizzle, "k": swizzle, "v": swizzle})).smem
    assert atoms(smem) == {"q": k_major, "k": k_major, "v": "" if swizzle == "none" else k_major}
    assert atoms(make_plan(changed("k4_smem_d128", handoff={"swizzle": swizzle})).smem)["p"] == k_major
    # Transposed inputs, and O as ever: its rows are contiguous, those of Q are not.
    smem = make_plan(changed("k4_transposed_d64", smem={"q": swizzle, "k": swizzle, "v": swizzle})).smem
    assert atoms(smem) == {"q": mn_major, "k": mn_major, "v": k_major, "o": k_major}
    p = make_plan(changed("k4_p_mn_d64", handoff={"swizzle": swizzle})).smem.p
    assert p == LayoutPlan("P", mn_major, False, along="queries", shape="TILE_M, TILE_N", order="1, 0")


def atoms(smem: SmemPlan) -> dict[str, str]:
    """CuTe's names of the layouts that there are."""
    layouts = {"q": smem.q, "k": smem.k, "v": smem.v, "p": smem.p, "o": smem.o}
    return {name: layout.atom for name, layout in layouts.items() if layout is not None}


def test_what_a_launch_is_given() -> None:
    assert plan("k4_2_d128").entry.given == ("q", "k", "v", "out", "lse")
    assert plan("k1_d128").entry.given == ("q", "k", "v", "out", "lse", "scores")
    assert plan("k4_2_o_only_d128_causal").entry.given == ("q", "k", "v", "out")
    # A persistent kernel needs to know the SMs. What one that draws or splits tiles keeps between calls it asks for.
    for stem in ("fwd_d128_static", "fwd_d128_causal", "fwd_d128"):
        assert plan(stem).entry.given == ("q", "k", "v", "out", "lse", "num_sms")


def test_what_stands_for_arguments_when_a_module_is_compiled() -> None:
    def stand_ins(stem: str) -> str:
        return ", ".join(map(str, plan(stem).entry.stand_ins))

    assert stand_ins("k1_d128") == "lse, scores, cutlass.Float32(1.0)"
    assert stand_ins("k4_2_o_only_d128_causal") == "cutlass.Float32(1.0)"
    assert stand_ins("fwd_d128") == "lse, cutlass.Int32(1), flags, parts, cutlass.Float32(1.0)"
    assert stand_ins("fwd_d128_causal") == "lse, cutlass.Int32(1), counter, cutlass.Float32(1.0)"


@pytest.mark.parametrize(
    ("stem", "pipeline", "nvgpu"),
    [
        ("k1_d64", False, ""),
        ("k2_d64", False, "warpgroup"),
        ("k2_cp_async_d64", False, "cpasync, warpgroup"),
        ("k3_2_d64", True, "cpasync, warpgroup"),
        ("k4_1_d64", True, "OperandMajorMode, cpasync, warpgroup"),
        ("k4_smem_d64", True, "OperandMajorMode, cpasync, warp, warpgroup"),
        ("k4_2_d64", True, "OperandMajorMode, cpasync, warp, warpgroup"),
        ("fwd_d128", True, "OperandMajorMode, cpasync, warp, warpgroup"),
        ("fwd_d256", True, "OperandMajorMode, cpasync, warpgroup"),  # O goes to global memory without stmatrix
    ],
)
def test_imports(stem: str, pipeline: bool, nvgpu: str) -> None:
    imports = plan(stem).imports
    assert (imports.pipeline, imports.nvgpu, imports.smem_allocator) == (pipeline, nvgpu, stem != "k1_d64")


@pytest.mark.parametrize(
    ("stem", "sections"),
    [
        (
            "k2_cp_async_d64_causal",
            "host_scalar kernel_scalar_cp_async range_causal loads_cp_async work_scalar qk_scalar mask_smem_causal "
            "softmax_smem pv_scalar epilogue_scalar",
        ),
        (
            "k4_1_d64",
            "host_scalar kernel_scalar_tma range_none loads_tma work_scalar qk_wgmma mask_smem_none softmax_smem "
            "pv_scalar epilogue_scalar",
        ),
        (
            "k4_smem_d64",
            "host_wgmma kernel_wgmma range_none loads_tma work_fragment qk_wgmma mask_fragment_none softmax_fragment "
            "pv_wgmma_smem epilogue_wgmma",
        ),
        (
            "k4_2_window_d64_window512_0",
            "host_wgmma kernel_wgmma range_window loads_tma work_fragment qk_wgmma mask_fragment_window "
            "softmax_fragment pv_wgmma_registers epilogue_wgmma",
        ),
        (
            "k5_d64",
            "scheduler_single_tile range_none consumer_sequential work_fragment qk_wgmma mask_fragment_none "
            "softmax_fragment pv_wgmma_fragment epilogue_wgmma",
        ),
        (
            "k6_d128_causal",
            "scheduler_single_tile range_causal consumer_overlapped work_fragment qk_wgmma mask_fragment_causal "
            "softmax_overlapped pv_wgmma_fragment epilogue_wgmma",
        ),
        (
            "fwd_d128_causal",
            "scheduler_dynamic range_causal consumer_overlapped work_fragment qk_wgmma mask_fragment_causal "
            "softmax_overlapped pv_wgmma_fragment epilogue_own_buffer",
        ),
        (
            "fwd_d192_128_window",
            "scheduler_static range_window consumer_overlapped work_fragment qk_wgmma mask_fragment_window "
            "softmax_overlapped pv_wgmma_fragment epilogue_direct",
        ),
        (
            "fwd_d256",
            "scheduler_stream_k range_none consumer_overlapped work_fragment qk_wgmma mask_fragment_none "
            "softmax_overlapped pv_wgmma_fragment epilogue_direct",
        ),
    ],
)
def test_sections(stem: str, sections: str) -> None:
    chosen = plan(stem).sections
    specialized = stem.startswith(("k5", "k6", "k7", "k8", "fwd"))
    # Host, kernel and loads of all specialised kernels are one section each, which their spine names.
    order = ["scheduler"] if specialized else ["host", "kernel"]
    order += [
        "range",
        *([] if specialized else ["loads"]),
        "consumer",
        "work",
        "qk",
        "mask",
        "softmax",
        "pv",
        "epilogue",
    ]
    found = [getattr(chosen, name) for name in order]
    assert [name for name in found if name] == [f"sections/{name}.py.jinja" for name in sections.split()]
    assert bool(chosen.consumer) == bool(chosen.scheduler) == specialized
    assert chosen.spine == f"{'specialized' if specialized else 'fused'}.py.jinja"


def test_scheduler_softmax_and_output() -> None:
    """What the sections ask: who hands out tiles, whether O is rescaled now and then, where it is stored."""
    scheduler = {stem: plan(stem).scheduler for stem in ATTENTION}
    told: dict[str, Scheduler] = {
        "k6_d128": "single_tile",
        "fwd_d128_static": "static",
        "fwd_d128": "stream_k",
        "fwd_d128_causal": "dynamic",
    }
    for stem, kind in told.items():
        assert scheduler[stem] == SchedulerPlan(
            kind,
            persistent=kind != "single_tile",
            longest_first=False,
            passes_coordinates=kind == "dynamic",
            shuffles_coordinates=False,
            slots=2,
            told="1",
            key_bytes="((HEAD_DIM + HEAD_DIM) * 2)",
            waves_when_short=kind == "dynamic",
        )
    assert {stem for stem in ATTENTION if scheduler[stem].shuffles_coordinates} == {
        stem
        for stem in ATTENTION
        if scheduler[stem].kind == "stream_k"
        and not scheduler[stem].packed_shares
        and plan(stem).problem.head_dim != 128
    }
    # With a tile to a CTA the last rows come first where they see the most keys; tiles that are drawn have their order.
    assert [stem for stem in ATTENTION if scheduler[stem].longest_first] == [
        stem for stem in ATTENTION if plan(stem).mask.kind == "causal" and not scheduler[stem].persistent
    ]
    found = scheduler["fwd_d128"]
    assert (found.parts, found.steps_saved, found.slots, found.l2_mib) == (8, 4, 2, 32)
    assert (found.short_keys, found.wave_sms) == (1024, 132)
    assert plan("fwd_d128_causal").softmax == SoftmaxPlan(lazy=False, rescale_above=0, exp_before_wait=12)
    assert plan("fwd_d192").softmax == SoftmaxPlan(lazy=True, rescale_above=8)
    assert plan("fwd_d256").softmax == SoftmaxPlan(lazy=True, rescale_above=8, mask_end="when_cut")
    stems = ("k6_d128", "fwd_d128", "fwd_d256", "fwd_d128_pack4_causal")
    assert [(plan(stem).output.place, plan(stem).output.stored_rows) for stem in stems] == [
        ("over_q", "TILE_M"),
        ("own_buffer", "WARP_ROWS"),
        ("direct", "TILE_M"),
        ("own_buffer", "PACKED_WARP_ROWS"),
    ]
    # Only with a second buffer can the next tile's Q be there when the products of this one end.
    assert [(plan(stem).load.q_stages, plan(stem).schedule.flattened) for stem in ("fwd_d128", "fwd_d256")] == [
        (2, True),
        (1, False),
    ]
    assert not plan("k6_d128").schedule.flattened


def test_arguments_of_specialised_kernels() -> None:
    """What depends on the scheduler, on where O goes, on the LSE and on turns, and nothing else."""
    one, full, split = (plan(stem).arguments for stem in ("k6_d128", "fwd_d128_causal", "fwd_d256"))
    plain = make_plan(changed("fwd_d256", scheduler="static")).arguments
    assert ", ".join(map(str, one.launch)) == "q, k, v, out, lse, scale: cutlass.Float32"
    assert (
        ", ".join(map(str, full.launch)) == "q, k, v, out, lse, num_sms: cutlass.Int32, counter, scale: cutlass.Float32"
    )
    assert ", ".join(map(str, plain.launch)) == "q, k, v, out, lse, num_sms: cutlass.Int32, scale: cutlass.Float32"
    scale = "scale_log2: cutlass.Float32"
    assert ", ".join(map(str, one.kernel)) == f"mQ, mK, mVt, mO, mLSE, tma_Q, tma_K, tma_V, tma_O, {scale}"
    assert ", ".join(map(str, full.kernel)) == (
        f"mQ, mK, mVt, mO, mLSE, counter, tma_Q, tma_K, tma_V, tma_O, {scale}, num_tiles: cutlass.Int32"
    )
    assert (
        ", ".join(map(str, plain.kernel))
        == f"mQ, mK, mVt, mO, mLSE, tma_Q, tma_K, tma_V, {scale}, num_tiles: cutlass.Int32"
    )
    assert (one.schedule, plain.schedule) == (("mQ", "mK"), ("mQ", "mK", "num_tiles"))
    assert ", ".join(full.schedule) == "mQ, mK, num_tiles, counter, tile_ring, tiles"
    rest = "scale_log2, work, schedule"
    assert ", ".join(full.consume) == ", ".join(one.consume) == f"mO, mLSE, tma_O, sO, {rest}"
    assert ", ".join(plain.consume) == f"mO, mLSE, {rest}"
    # A module that splits tiles has flags and parts, and says how much there is in one tuple.
    assert (
        ", ".join(map(str, split.launch))
        == "q, k, v, out, lse, num_sms: cutlass.Int32, flags, parts, scale: cutlass.Float32"
    )
    assert (
        ", ".join(map(str, split.kernel)) == f"mQ, mK, mVt, mO, mLSE, flags, parts, tma_Q, tma_K, tma_V, {scale}, tail"
    )
    assert (", ".join(split.consume), split.schedule) == (f"mO, mLSE, scratch, {rest}", ("mQ", "mK", "tail"))
    assert ", ".join(split.store_tile) == "mO, mLSE, work, acc_O, row_max, row_sum, scale_log2"
    no_lse = plan("fwd_d64_window_o_only").arguments
    assert ", ".join(map(str, no_lse.launch)) == "q, k, v, out, num_sms: cutlass.Int32, counter, scale: cutlass.Float32"
    assert ", ".join(no_lse.store_tile) == "mO, tma_O, sO, work, acc_O, row_sum"
    alone = make_plan(changed("fwd_d256", schedule={"kind": "warp_specialized", "overlap": True})).arguments
    for name in ("multiply", "multiply_first"):
        assert getattr(split, name) == (*getattr(alone, name), "consumer")
    # Sinks and caps go where the scale goes.
    sunk, capped = (plan(stem).arguments for stem in ("fwd_d64_sink_causal", "fwd_d256_softcap_causal"))
    number = "num_sms: cutlass.Int32, counter, scale: cutlass.Float32"
    assert ", ".join(map(str, sunk.launch)) == f"q, k, v, out, lse, sinks, {number}"
    assert ", ".join(map(str, capped.launch)) == f"q, k, v, out, lse, softcap: cutlass.Float32, {number}"
    assert ", ".join(sunk.consume) == f"mO, mLSE, tma_O, sO, mSinks, {rest}"
    assert ", ".join(capped.consume) == "mO, mLSE, scale_log2, cap_scale, work, schedule"
    assert ", ".join(sunk.store_tile) == ("mO, mLSE, tma_O, sO, work, acc_O, row_lse, row_inverse")
    assert (sunk.factors, capped.factors) == (("scale * LOG2_E",), ("softcap * LOG2_E", "scale / softcap"))
    lengths = "cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k"
    packed, both = (plan(f"fwd_packed_{stem}") for stem in ("sink_d64_causal", "softcap_d256_any_window"))
    assert ", ".join(map(str, packed.arguments.launch)) == f"q, k, v, {lengths}, out, lse, sinks, {number}"
    assert packed.entry.options[:3] == ("sinks", "seqused_q=None", "seqused_k=None")
    assert ", ".join(both.entry.options[:4]) == "softcap, seqused_q=None, seqused_k=None, window=(-1, -1)"
    assert both.arguments.factors == capped.factors and packed.entry.empty_phrase == "its sink"
    # What launch passes are the kernel's parameters, in their order.
    for stem in SPECIALIZED:
        found = plan(stem).arguments
        # With factors of q or k each tile of queries has a scale of its own.
        descaled = any(each.name == "k_descale" for each in found.launch)
        scale = "call_scale_log2" if descaled else "scale_log2"
        factors = dict(zip(found.factors, (scale, "cap_scale"), strict=False))
        assert tuple(each.name for each in found.kernel) == tuple(factors.get(text, text) for text in found.kernel_call)
        assert [each.name for each in found.launch] == [
            argument.name for argument in operation_of(plan(stem).spec).arguments
        ]


# What the compiler must make of it


def test_without_a_swizzle_rows_are_one_box_or_many() -> None:
    """A row of 128 bf16: one box of a plain tile, 16 of core matrices 16 bytes wide. Q, and K and V twice each."""
    none = {"q": "none", "k": "none", "v": "none"}
    for stem, boxes in (("k3_2_d128", (1, 1)), ("k4_2_d128", (16, 16)), ("k4_1_d128", (16, 1))):
        expected = make_plan(changed(stem, smem=none)).expectation
        assert expected.tma_loads == boxes[0] + 2 * (boxes[0] + boxes[1])


@pytest.mark.parametrize(
    ("extent", "swizzle", "boxes"),
    [(256, "128B", 2), (128, "128B", 1), (128, "64B", 2), (128, "32B", 4), (64, "none", 4)],
)
def test_tma_boxes(extent: int, swizzle: Any, boxes: int) -> None:
    assert tma_boxes(extent, swizzle) == boxes


@pytest.mark.parametrize(
    ("stem", "expected"),
    [
        # Nothing but plain loads and multiply-adds, in three kernels; 65536 / 256 threads = 256, but at most 255.
        (
            "k1_d128",
            {"kernels": 3, "wgmma": {}, "wgmma_commits": 0, "tma_loads": 0, "cp_async": 0, "smem_bytes": 0}
            | {"max_registers": 255},
        ),
        ("k2_d64", {"kernels": 1, "wgmma": {}, "tma_loads": 0, "cp_async": 0, "mbarrier_inits": 0, "stmatrix": 0}),
        # A tile is 64 rows of 64 / 8 = 8 vectors, 512 / 128 threads = 4 copies for each thread. Tiles: Q, K and V of
        # the two stages of the prefetch, K and V in the loop: 1 + 4 + 2 = 7.
        ("k2_cp_async_d64", {"cp_async": 28, "tma_loads": 0, "mbarrier_inits": 0}),
        # Twice as many vectors.
        ("k2_cp_async_d128", {"cp_async": 56}),
        # A row is 128 bytes, one box: Q, and K and V in the prefetch and in the loop, 1 + 2 + 2. The bytes of K and V
        # are announced together: Q, prefetch, loop. 1 + 2 x 5 barriers.
        (
            "k3_3_d64",
            {
                "wgmma": {},
                "tma_loads": 5,
                "tma_stores": 0,
                "mbarrier_expect_tx": 3,
                "mbarrier_inits": 11,
                "cp_async": 0,
            },
        ),
        # A row is 256 bytes, two boxes: 2 + 4 + 4.
        ("k3_1_d128", {"tma_loads": 10, "mbarrier_expect_tx": 3, "mbarrier_inits": 3}),
        # S: 128 / 16 = 8 products of depth 16; PV is scalar. K and V are announced apart: Q, 2 in the prefetch, 2 in
        # the loop.
        (
            "k4_1_d128",
            {"wgmma": {(64, 64, 16, "smem"): 8}, "wgmma_commits": 1, "wgmma_waits": 1, "tma_loads": 10}
            | {"tma_stores": 0, "mbarrier_expect_tx": 5, "mbarrier_inits": 9, "stmatrix": 0, "smem_bytes": 101376},
        ),
        # S: 128 / 16 = 8 of N = 64; O: 64 / 16 = 4 of N = 128. stmatrix moves 16 columns: O 128 / 16, P 64 / 16.
        (
            "k4_smem_d128",
            {"wgmma": {(64, 64, 16, "smem"): 8, (64, 128, 16, "smem"): 4}, "wgmma_commits": 2, "wgmma_waits": 2}
            | {"tma_loads": 10, "tma_stores": 2, "mbarrier_expect_tx": 3, "mbarrier_inits": 5, "stmatrix": 12}
            | {"smem_bytes": 115712},
        ),
        # Two products of one shape add up: 64 / 16 each. stmatrix: O 64 / 16, P 64 / 16.
        (
            "k4_smem_d64",
            {"wgmma": {(64, 64, 16, "smem"): 8}, "tma_loads": 5, "tma_stores": 1, "stmatrix": 8},
        ),
        # As k4_smem_d128 with P from registers; only O goes through stmatrix, 128 / 16.
        (
            "k4_2_d128",
            {"wgmma": {(64, 64, 16, "smem"): 8, (64, 128, 16, "registers"): 4}, "wgmma_commits": 2, "wgmma_waits": 2}
            | {"tma_loads": 10, "tma_stores": 2, "mbarrier_expect_tx": 5, "mbarrier_inits": 9, "stmatrix": 8}
            | {"ldmatrix": 0, "cp_async": 0, "setmaxnreg": {}, "smem_bytes": 99328, "max_registers": 255}
            | {"kernels": 1, "spills": 0, "stack_bytes": 0, "serialized_wgmma": False},
        ),
        (
            "k4_2_d64",
            {"wgmma": {(64, 64, 16, "smem"): 4, (64, 64, 16, "registers"): 4}, "tma_loads": 5, "stmatrix": 4},
        ),
        # 128 queries side by side are two spans of 64: 2 boxes; 64 keys of K and of V: 1 each, ahead and in the loop.
        ("k4_transposed_d64", {"tma_loads": 2 + 2 * 2, "tma_stores": 1, "stmatrix": 4}),
        # Transposed on the way, P takes as many stmatrix: 64 / 16; O another 64 / 16.
        ("k4_p_mn_d64", {"tma_loads": 5, "stmatrix": 8}),
        # O goes out from the registers, without stmatrix and without TMA.
        ("k4_direct_d64", {"tma_loads": 5, "tma_stores": 0, "stmatrix": 0}),
        # The same, both from registers; a warp's 16 rows of Q are 128 / 16 blocks of 16 x 16, one ldmatrix.x4 each.
        (
            "k4_q_registers_d128",
            {"wgmma": {(64, 64, 16, "registers"): 8, (64, 128, 16, "registers"): 4}, "wgmma_waits": 2}
            | {"tma_loads": 10, "stmatrix": 8, "ldmatrix": 8, "smem_bytes": 99328},
        ),
        # S: 64 / 16 = 4 of N = 128, O: 128 / 16 = 8 of N = 64. The producer has no prefetch: Q, K and V, one box each,
        # announced once each; 2 x (1 + 2 + 2) barriers. 4 x 128 threads: launched with 65536 / 512 = 128 registers.
        (
            "k5_d64",
            {"wgmma": {(64, 128, 16, "smem"): 4, (64, 64, 16, "registers"): 8}, "wgmma_commits": 2, "wgmma_waits": 2}
            | {"tma_loads": 3, "tma_stores": 1, "mbarrier_expect_tx": 3, "mbarrier_inits": 10, "stmatrix": 4}
            | {"setmaxnreg": {"dec 32": 1, "inc 160": 1}, "max_registers": 128},
        ),
        # With overlap the first S and the last P V stand beside the loop: 2 x 8 of either. Two boxes for each of Q, K
        # and V. 3 x 128 threads: 65536 / 384 = 170, in units of 8: 168.
        (
            "ping_pong_d128",
            {"wgmma": {(64, 128, 16, "smem"): 16, (64, 128, 16, "registers"): 16}, "wgmma_commits": 4}
            | {"wgmma_waits": 4, "tma_loads": 6, "tma_stores": 2, "mbarrier_expect_tx": 3, "stmatrix": 8}
            | {"setmaxnreg": {"dec 24": 1, "inc 240": 1}, "max_registers": 168},
        ),
        # Q K^T stands before the loop over tiles of queries, in two loops over tiles of keys, with an edge and without,
        # and beside the last P V: 4 x 8. P V stands in the two loops and after them: 3 x 8. A wait for each of the 7.
        # Rows of 256 bytes, two boxes each. Rings of 2 stages for Q, K, V and tiles, full and empty: 16 barriers.
        (
            "fwd_d128_causal",
            {"wgmma": {(64, 128, 16, "smem"): 32, (64, 128, 16, "registers"): 24}, "wgmma_commits": 7}
            | {"wgmma_waits": 7, "tma_loads": 6, "tma_stores": 2, "mbarrier_inits": 16, "mbarrier_expect_tx": 3}
            | {"stmatrix": 8, "setmaxnreg": {"dec 24": 1, "inc 240": 1}, "max_registers": 168, "smem_bytes": 230400},
        ),
        # One loop over tiles of keys, one Q K^T before it, one P V after it: 2 x 192 / 16 and 2 x 128 / 16. Q and K
        # have 3 boxes, V has 2; the first K of a tile is loaded before Q, the others in a loop: 3 + 2 x 3 + 2. Q has
        # one barrier, K and V two for each of two stages. O goes out without TMA and stmatrix.
        (
            "fwd_d192_128",
            {"wgmma": {(64, 128, 16, "smem"): 24, (64, 128, 16, "registers"): 16}, "wgmma_commits": 4}
            | {"wgmma_waits": 4, "tma_loads": 11, "tma_stores": 0, "mbarrier_inits": 9, "mbarrier_expect_tx": 4}
            | {"stmatrix": 0},
        ),
        # Two loops: 3 x 256 / 16 and 3 x 80 / 16. 512 bytes are 4 boxes: Q, K twice, V. Tiles are a ring, too:
        # 1 + 2 x (2 + 2 + 2).
        # Q 65536, K and V 2 x 80 x 256 x 2 = 81920 each, 8 for tiles, 104 for barriers: 229488, up to 225 x 1024.
        (
            "fwd_d256_causal",
            {"wgmma": {(64, 80, 16, "smem"): 48, (64, 256, 16, "registers"): 15}, "wgmma_commits": 6}
            | {"wgmma_waits": 6, "tma_loads": 16, "tma_stores": 0, "mbarrier_inits": 13, "stmatrix": 0}
            | {"smem_bytes": 230400},
        ),
        # Two CTAs of 2 x 128 threads on an SM: 65536 / 512 = 128 registers; 2 x 128 = 24 + 232. Q and the first K stand
        # before the roles, 2 boxes each, as K and V in their loops. Q, K, V: (64 + 2 x 64 + 2 x 64) x 128 x 2 = 81920,
        # and 9 barriers, up to 81 x 1024.
        (
            "fwd_small_d128",
            {"wgmma": {(64, 64, 16, "smem"): 16, (64, 128, 16, "registers"): 8}, "wgmma_commits": 4, "wgmma_waits": 4}
            | {"tma_loads": 8, "tma_stores": 0, "mbarrier_inits": 9, "mbarrier_expect_tx": 4, "smem_bytes": 82944}
            | {"setmaxnreg": {"dec 24": 1, "inc 232": 1}, "max_registers": 128},
        ),
        # Boxes of 64 bytes: 3 to a row, also of O. Q K^T 3 x 96 / 16 (one loop, one before all, one beside the last
        # P V), P V 2 x 112 / 16. Q 2 x 192 x 96 x 2 = 73728, K and V 2 x 112 x 96 x 2 = 43008 each, O 36864: 196608,
        # and 12 barriers, up to 193 x 1024.
        (
            "fwd_d96",
            {"wgmma": {(64, 112, 16, "smem"): 18, (64, 96, 16, "registers"): 14}, "wgmma_commits": 5, "wgmma_waits": 5}
            | {"tma_loads": 9, "tma_stores": 3, "mbarrier_inits": 12, "stmatrix": 6, "smem_bytes": 197632}
            | {"setmaxnreg": {"dec 32": 1, "inc 160": 1}, "max_registers": 128},
        ),
    ],
)
def test_expectation(stem: str, expected: dict[str, Any]) -> None:
    found = plan(stem).expectation
    assert {name: getattr(found, name) for name in expected} == expected


def test_expectation_of_the_sass() -> None:
    # A thread has 2 rows of 128 / 4 = 32 scores, and exchanges their maxima in 2 steps: 2 x 34 for each softmax. There
    # are three: before the loops, for tiles with an edge, for the others. In each one comparison holds the wait for P V
    # back, and at the end are 2 x 2 of rows with numbers. 7 products. O: 128 / 64 boxes, 128 / 16 stmatrix. LSE: one
    # store for each row; one more for the counter.
    assert plan("fwd_d128_causal").expectation.sass == SassExpectation(
        waits=7,
        min_maxima=204,
        max_comparisons=7,
        global_stores={"STG.32": 3, "UTMASTG": 2},
        shared_stores={"STSM.4": 8, "STS.128": 1, "STS.32": 0},
    )
    # O straight from registers: 2 rows of 128 / 4 elements, 8 at a time. One loop for all tiles, without a mask.
    whole = make_plan(changed("fwd_d192_128", scheduler="static", softmax={"exp_before_wait": None})).expectation.sass
    assert whole == SassExpectation(
        waits=4,
        min_maxima=136,
        max_comparisons=4,
        global_stores={"STG.32": 2, "STG.128": 8, "UTMASTG": 0},
        shared_stores={"STSM.4": 0, "STS.128": 0, "STS.32": 0},
    )
    # A part of a tile: 64 float32 of O and 2 + 2 for two rows, 4 at a time; its flag, set and set back; the larger of
    # two maxima of each row. A comparison in each of the two softmaxes, for the branch that holds the wait back.
    assert plan("fwd_d192_128").expectation.sass == SassExpectation(
        waits=4,
        min_maxima=138,
        max_comparisons=6,
        global_stores={"STG.32": 4, "STG.128": 8 + 17, "UTMASTG": 0},
        shared_stores={"STSM.4": 0, "STS.128": 0, "STS.32": 0},
    )
    # O rescaled rarely: another 2 for each of two softmaxes, before the loop and in it.
    assert plan("fwd_d256").expectation.sass.max_comparisons == 8
    # 64 x 16 / 128 = 8 rows, of which a thread has 64 / 16 = 4 scores and 4 elements of O, 8 bytes; 4 exchanges.
    assert plan("k2_d64").expectation.sass == SassExpectation(
        waits=0, min_maxima=64, max_comparisons=16, global_stores={"STG.32": 8, "STG.64": 8, "UTMASTG": 0}
    )


def test_expectation_of_narrow_swizzles() -> None:
    # Rows of 256 bytes: Q in 4 boxes of 64 bytes, K in 8 of 32, V in 2 of 128; O leaves through Q's layout.
    found = make_plan(changed("k4_2_d128", smem={"q": "64B", "k": "32B", "v": "128B"})).expectation
    assert (found.tma_loads, found.tma_stores) == (4 + 2 * (8 + 2), 4)


def test_registers_that_threads_leave() -> None:
    # 512 threads: 65536 / 512 = 128 registers each.
    assert make_plan(changed("k2_d64", tile={"threads": 512})).expectation.max_registers == 128


# The header against the code


def table(rows: tuple[str, ...]) -> list[list[str]]:
    """Cells of a table's rows, the row of titles left out."""
    return [re.split(r" {2,}", row.strip()) for row in rows[1:]]


@pytest.mark.parametrize("stem", STEMS)
def test_header_is_in_the_module(stem: str) -> None:
    docstring = ast.get_docstring(tree(stem), clean=False)
    assert docstring is not None
    header = plan(stem).header
    lines = [*header.decisions, *header.threads, *header.barriers, *header.smem, *header.timeline]
    assert [line for line in lines if f"\n    {line}\n" not in docstring] == []
    assert docstring.startswith(f"{header.title}\n\nGenerated by fa3gen from {variants()[stem].source}; do not edit.")
    assert f"\n    fa3gen render {variants()[stem].source}\n" in docstring


@pytest.mark.parametrize("stem", [*FUSED, *sorted(set(STEMS) - set(ATTENTION))])
def test_shared_memory_table(stem: str) -> None:
    """Offsets follow from the sizes above them; the last row is the total that the launch asks for."""
    smem = plan(stem).cta
    if not smem.smem_bytes:  # rows that pass through registers only
        assert table(plan(stem).header.smem) == [] and "SharedStorage" not in ast.unparse(code(stem))
        return
    *regions, total = table(plan(stem).header.smem)
    assert total[:2] == [str(smem.smem_bytes), "total"]
    end = 0
    for (offset, size, name, _), region in zip(regions, smem.regions, strict=False):
        assert int(offset) == -(-end // region.align) * region.align
        assert (name, int(size)) == (region.name, region.bytes)
        end = int(offset) + int(size)
    if smem.barrier_bytes:
        count = smem.barrier_bytes // 8
        words = f"{count} mbarrier{'s' * (count > 1)}"
        assert regions[-1] == [str(end), str(smem.barrier_bytes), "barriers", words]
        end += smem.barrier_bytes
    assert len(regions) == len(smem.regions) + (smem.barrier_bytes > 0)
    assert smem.smem_bytes - 1024 < end <= smem.smem_bytes <= 232448


def transposed_rows(stem: str, warps: int) -> list[list[str]]:
    """The row of V transposed, which warps fill for so many others."""
    values, members = constants(code(stem)), storage(stem)
    count, stages, last = values["TRANSPOSER_WARPS"], values["KV_STAGES"], values["THREADS"] // 32
    assert (members["sVt"], members["vt_barriers"]) == (members["sV"], 2 * 8 * stages)
    between = "and" if count == 2 else "to"  # two of the last warpgroup, or all of it
    edge = f"warps {last - count} {between} {last - 1} -> {warps} warps"
    return [["vt", str(stages), edge, f"{count} arrivals", f"{warps} arrivals"]]


def converted_rows(stem: str, name: str, loader: str) -> list[list[str]]:
    """The rows of K, or V, that comes in 8 bits to a ring of its own, of which warps fill the other one."""
    values, members, count = constants(code(stem)), storage(stem), constants(code(stem))["CONVERTER_WARPS"]
    if plan(stem).load.pages == "cp_async":  # of such a ring every thread gives a stage back
        stages = values["STORED_STAGES"]
        edge = [f"{loader} -> {count} warps", "1 arrival", f"{count * values['WARP']} arrivals"]
    else:
        stages, size = (evaluate(expression, values) for expression in ring_calls(stem)[f"{name}8"])
        assert stages * size == members[f"s{name.upper()}8"]
        edge = [f"TMA, from {loader} -> {count} warps", f"{size} bytes", f"{count} arrivals"]
    assert members[f"{name}8_barriers"] == 2 * 8 * stages
    assert members[f"{name}_barriers"] == 2 * 8 * values["KV_STAGES"]
    first = values["THREADS"] // 32 - count * (2 if name == "k" else 1)
    who = f"warps {first} {'and' if count == 2 else 'to'} {first + count - 1}"
    warps, given_back = values["CONSUMER_WARPS"], values["CONSUMER_WARPS"] * values["WARP"]
    return [
        [f"{name}8", str(stages), *edge],
        [name, str(values["KV_STAGES"]), f"{who} -> {warps} warps", f"{count} arrivals", f"{given_back} arrivals"],
    ]


def storage(stem: str) -> dict[str, int]:
    """Member of SharedStorage -> bytes, from the module's own source."""
    values, spec = constants(code(stem)), plan(stem).spec
    sizes = {**BYTES, "DTYPE": spec.element.bytes}
    if isinstance(spec, Gemm):
        sizes["OUT_DTYPE"] = spec.d_element.bytes
    elif isinstance(spec, Forward):
        sizes |= {"OUT_DTYPE": spec.o_element.bytes, "KV_DTYPE": spec.kv_element.bytes}
    members: dict[str, int] = {}
    (struct,) = [node for node in code(stem).body if isinstance(node, ast.ClassDef) and node.name == "SharedStorage"]
    for member in struct.body:
        assert isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name)
        ranges = [node for node in ast.walk(member.annotation) if is_range(node)]
        if not ranges:
            members[member.target.id] = sizes[ast.unparse(member.annotation)]
            continue
        assert isinstance(ranges[0], ast.Subscript) and isinstance(ranges[0].slice, ast.Tuple)
        element, count = ranges[0].slice.elts
        members[member.target.id] = sizes[ast.unparse(element)] * evaluate(count, values)
    return members


def is_range(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and ast.unparse(node.value) == "cute.struct.MemRange"


def evaluate(expression: ast.expr, values: dict[str, int]) -> int:
    value = eval(compile(ast.Expression(expression), "<module>", "eval"), {"__builtins__": {}}, values)
    assert isinstance(value, int)
    return value


@pytest.mark.parametrize("stem", [*FUSED, *sorted(set(STEMS) - set(ATTENTION))])
def test_storage_is_what_the_header_says(stem: str) -> None:
    smem = plan(stem).cta
    members = storage(stem) if smem.smem_bytes else {}
    barriers = {name: size for name, size in members.items() if name not in {region.name for region in smem.regions}}
    assert list(members)[: len(smem.regions)] == [region.name for region in smem.regions]
    assert {name: members[name] for name in members if name not in barriers} == {r.name: r.bytes for r in smem.regions}
    assert sum(barriers.values()) == smem.barrier_bytes


@pytest.mark.parametrize("stem", sorted(set(TMA) - set(SPECIALIZED)))
def test_barrier_table(stem: str) -> None:
    """The rows of the table are the barriers in shared memory, and their bytes are what the code announces."""
    values = constants(code(stem))
    rows = {name: (int(stages), edge, completes) for name, stages, edge, completes in table(plan(stem).header.barriers)}
    assert 8 * sum(stages for stages, _, _ in rows.values()) == plan(stem).smem.barrier_bytes
    assert rows["q_full"][2] == f"{values['Q_BYTES']} bytes"
    assert values["Q_BYTES"] == values["TILE_M"] * values["HEAD_DIM"] * 2
    announced = transaction_bytes(stem)
    for ring, expression in announced.items():
        stages, edge, completes = rows.pop(f"{ring}_full")
        assert stages == values["KV_STAGES"]
        assert int(completes.split()[0]) == evaluate(expression, values)
        stages, back, completes = rows.pop(f"{ring}_empty")
        assert stages == values["KV_STAGES"]
        warps = values["THREADS"] // 32
        assert (edge, back, completes) == (f"TMA -> {warps} warps", f"{warps} warps -> warp 0", f"{warps} arrivals")
    assert list(rows) == ["q_full"]


def transaction_bytes(stem: str) -> dict[str, ast.expr]:
    """Ring -> the expression given as tx_count where the module creates its barriers."""
    found: dict[str, ast.expr] = {}
    for node in walked(code(stem)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            count = [keyword.value for keyword in node.value.keywords if keyword.arg == "tx_count"]
            if count and isinstance(node.targets[0], ast.Name):
                found[node.targets[0].id.removesuffix("_ring")] = count[0]
    return found


@pytest.mark.parametrize("stem", sorted(set(TMA) - set(SPECIALIZED)))
def test_bytes_of_a_phase_are_the_bytes_of_a_stage(stem: str) -> None:
    """What the barriers wait for is what lands in shared memory: a tile of Q, one stage of K, one of V."""
    values, members = constants(code(stem)), storage(stem)
    announced = sum(evaluate(expression, values) for expression in transaction_bytes(stem).values())
    assert announced == values["K_BYTES"] + values["V_BYTES"]
    assert announced * values["KV_STAGES"] == members["sK"] + members["sV"]
    assert values["Q_BYTES"] == members["sQ"]


@cache
def ring_calls(stem: str) -> dict[str, tuple[ast.expr, ast.expr]]:
    """Ring -> stages and bytes of a stage, as the module gives them to `make_ring`."""
    found: dict[str, tuple[ast.expr, ast.expr]] = {}
    for node in walked(code(stem)):
        call = node.value if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.Assign) and isinstance(call, ast.Call) and ast.unparse(call.func) == "make_ring":
            barriers, stages, size, *_ = call.args
            name = ast.unparse(node.targets[0]).removesuffix("_ring")
            assert ast.unparse(barriers) == f"storage.{name}_barriers"
            found[name] = stages, size
    return found


def announced(stem: str) -> set[int]:
    """Bytes that the module announces at the barrier of Q."""
    calls = [node for node in walked(code(stem)) if isinstance(node, ast.Call)]
    called = [call.args for call in calls if ast.unparse(call.func) == "cute.arch.mbarrier_arrive_and_expect_tx"]
    return {evaluate(size, constants(code(stem))) for barrier, size in called if ast.unparse(barrier) == "q_full"}


@pytest.mark.parametrize("stem", SPECIALIZED)
def test_ring_table(stem: str) -> None:
    """A row for each ring of the code: its stages, who fills and empties it, and what completes a phase."""
    values, members = constants(code(stem)), storage(stem)
    warps = values["CONSUMER_WARPS"]
    placed, released = plan(stem).scheduler.kind == "grid", plan(stem).load.q_ring
    producers = ("K_PRODUCER_WARP" if placed else "Q_K_PRODUCER_WARP", "V_PRODUCER_WARP")
    if plan(stem).load.together:
        producers = "PRODUCER_WARP", "PRODUCER_WARP"
    first, second = (f"warp {values[name]}" for name in producers)
    titles, *rows = (re.split(r" {2,}", row) for row in plan(stem).header.barriers)
    assert titles == ["ring", "stages", "producer -> consumers", "full with", "empty with"]
    expected = []
    if not released:  # Q has one place and one barrier, and nobody gives it back
        size = members["sQ"]
        assert members["q_full"] == 8 and announced(stem) == {size}
        edge = f"TMA, from {'warp 0' if placed else first} -> {warps} warps"
        expected.append(["q", "1", edge, f"{size} bytes", "no reuse" if placed else "the last K"])
    # Of rings that are filled by cp.async every thread of a consumer gives a stage back.
    gathered = [("k", first), ("v", second)] if plan(stem).load.pages == "cp_async" else []
    by_tma = [("q", first)] * released + ([] if gathered else [("k", first), ("v", second)])
    for name, loader in by_tma:
        if name != "q" and plan(stem).converts:
            expected += converted_rows(stem, name, loader)
            continue
        stages, size = (evaluate(expression, values) for expression in ring_calls(stem)[name])
        assert stages * size == members[f"s{name.upper()}"]  # what lands in shared memory
        assert members[f"{name}_barriers"] == 2 * 8 * stages
        transposed = name == "v" and "TRANSPOSER_WARPS" in values  # by warps, from which consumers have it
        readers = values["TRANSPOSER_WARPS"] if transposed else warps
        edge = f"TMA, from {loader} -> {readers} warps"
        expected.append([name, str(stages), edge, f"{size} bytes", f"{readers} arrivals"])
        if transposed:
            expected += transposed_rows(stem, warps)
    for name, loader in gathered:
        if plan(stem).converts:
            expected += converted_rows(stem, name, loader)
            continue
        assert members[f"{name}_barriers"] == 2 * 8 * values["KV_STAGES"]
        transposed = name == "v" and "TRANSPOSER_WARPS" in values
        readers = values["TRANSPOSER_WARPS"] if transposed else warps
        edge, arrivals = f"{loader} -> {readers} warps", f"{readers * values['WARP']} arrivals"
        expected.append([name, str(values["KV_STAGES"]), edge, "1 arrival", arrivals])
        if transposed:
            expected += transposed_rows(stem, warps)
    if plan(stem).scheduler.tile_ring:
        slots = values["TILE_SLOTS"]
        (tiles,) = [region for region in plan(stem).smem.regions if region.name == "tiles"]
        assert (members["tiles"], members["tile_barriers"]) == (tiles.bytes, 2 * 8 * slots)
        # The other producer warp hears of the tiles, too; of packed sequences all that load, from one that finds tiles.
        packed = plan(stem).problem.packed_sequences
        finder = f"warp {values['TILE_WARP']}" if packed else first
        loaders = 2 if packed and not plan(stem).load.together else 1
        converters = 2 * values["CONVERTER_WARPS"] if plan(stem).converts else 0
        transposers = values.get("TRANSPOSER_WARPS", 0)
        told = warps + loaders + converters + transposers
        expected.append(["tile", str(slots), f"{finder} -> {told} warps", "1 arrival", f"{told} arrivals"])
        counted = f"CONSUMER_WARPS + {loaders}{' + 2 * CONVERTER_WARPS' * bool(converters)}"
        counted += " + TRANSPOSER_WARPS" * bool(transposers)
        assert f"CooperativeGroup(pipeline.Agent.Thread, {counted})" in ast.unparse(code(stem))
    assert rows == expected
    stored = "8" * plan(stem).converts
    assert sorted(ring_calls(stem)) == sorted(name if name == "q" else name + stored for name, _ in by_tma)


@pytest.mark.parametrize("stem", FUSED)
def test_constants_are_the_plan(stem: str) -> None:
    values, tile = constants(code(stem)), plan(stem).tile
    assert (values["TILE_M"], values["TILE_N"], values["THREADS"]) == (tile.m, tile.n, tile.threads)
    assert values["HEAD_DIM"] == plan(stem).problem.head_dim
    assert values.get("KV_STAGES", 1) == plan(stem).load.kv_stages
    assert values.get("Q_STAGES", 1) == plan(stem).load.q_stages
    assert values.get("HEAD_DIM_V", values["HEAD_DIM"]) == plan(stem).problem.v_dim
    assert values.get("RESCALE_ABOVE", 0) == plan(stem).softmax.rescale_above
    assert values.get("EXP_BEFORE_WAIT", 0) == plan(stem).softmax.exp_before_wait
    assert ("PARTS" in values) == (plan(stem).scheduler.kind == "stream_k")
    assert values.get("WARPGROUPS", tile.warpgroups) == tile.warpgroups
    window = (values.get("WINDOW_LEFT", 0), values.get("WINDOW_RIGHT", 0))
    assert window == (plan(stem).mask.left, plan(stem).mask.right)


def copies(stem: str, name: str) -> int:
    """How many times a function of the module stands in its kernel, all functions written out."""
    functions = {node.name: node for node in code(stem).body if isinstance(node, ast.FunctionDef)}
    in_loop = constants(code(stem)).get("STRIPES", 2) - 2

    @cache  # the same functions are called from many places
    def inside(function: ast.FunctionDef) -> int:
        calls = called(function) + (in_loop * in_stripes(function) if in_loop else [])
        return calls.count(name) + sum(inside(functions[call]) for call in calls if call in functions and call != name)

    return inside(functions["attention_kernel"])


@cache
def called(function: ast.FunctionDef) -> list[str]:
    """What is called by its name in a function."""
    return [node.func.id for node in ast.walk(function) if isinstance(node, ast.Call) and is_name(node.func)]


@cache
def in_stripes(function: ast.FunctionDef) -> list[str]:
    """What is called in a loop over all stripes of O but one, which is written out."""
    loops = [node for node in ast.walk(function) if isinstance(node, ast.For) and "STRIPES" in ast.unparse(node.iter)]
    calls = [node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Call)]
    return [call.func.id for call in calls if is_name(call.func)]


def is_name(node: ast.expr) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name)


@pytest.mark.parametrize("stem", [stem for stem in STEMS if stem.startswith(("k4_", "k5_", "k6_", "fwd_"))])
def test_header_counts_the_products_that_the_compiler_must_make(stem: str) -> None:
    """The header counts those of one step, the compiler sees as many copies of a step as the code has."""
    counted: dict[tuple[int, int, int, str], int] = {}
    pattern = r"(\d+) wgmma m(\d+)n(\d+)k(\d+) per warpgroup; A = (.) from (shared memory|registers)"
    groups = 0
    for steps, m, n, k, a, where in re.findall(pattern, "\n".join(plan(stem).header.decisions)):
        kind = (int(m), int(n), int(k), {"shared memory": "smem"}.get(where, where))
        times = copies(stem, {"Q": "qk_product", "P": "pv_product"}[a])
        counted[kind] = counted.get(kind, 0) + times * int(steps)
        groups += times
    assert counted == plan(stem).expectation.wgmma
    assert groups == plan(stem).expectation.wgmma_commits == plan(stem).expectation.wgmma_waits


@pytest.mark.parametrize("stem", STEMS)
def test_registers_in_the_header_add_up(stem: str) -> None:
    found = re.search(r"about (\d+) registers each: (.*)", " ".join(plan(stem).header.threads))
    if stem.startswith("k1_"):
        assert found is None
        return
    assert found is not None
    assert int(found[1]) == sum(int(count) for count in re.findall(r" (\d+)(?:,|$)", found[2])) <= 255


@pytest.mark.parametrize("stem", SPECIALIZED)
def test_register_budgets_in_the_header(stem: str) -> None:
    """setmaxnreg moves registers and makes none: the sum is within the launch's, which is within the SM's."""
    values, lines = constants(code(stem)), " ".join(plan(stem).header.threads)
    found = re.search(
        r"launched with (\d+) registers each; setmaxnreg moves them: "
        r"(\d+) \+ (?:(\d+) x (\d+) \+ )?(\d+) x (\d+) = (\d+) "
        r"of (\d+) x (\d+) = (\d+)",
        " ".join(lines.split()),
    )
    assert found is not None
    launched, producer, prepare, each, *rest = (int(number or 0) for number in found.groups())
    consumers, consumer, kept, warpgroups, again, total = rest
    named = {values[name] for name in ("TRANSPOSER_REGISTERS", "CONVERTER_REGISTERS") if name in values}
    assert named == ({each} if prepare else set())
    assert (producer, consumer) == (values["PRODUCER_REGISTERS"], values["CONSUMER_REGISTERS"])
    assert consumers == values["CONSUMERS"] == warpgroups - 1 - prepare and values["THREADS"] == 128 * warpgroups
    needed = producer + prepare * each + consumers * consumer
    assert (kept, total, again) == (needed, warpgroups * launched, launched)
    assert kept <= total and 128 * total <= 65536


@pytest.mark.parametrize("stem", SPECIALIZED)
def test_named_barrier_table(stem: str) -> None:
    values, place = constants(code(stem)), plan(stem).output.place
    lines = plan(stem).header.named_barriers
    rows = {name: (numbers, int(threads)) for numbers, name, threads, _ in (table(lines) if lines else ())}
    # Where O goes over Q, the consumers wait for each other; elsewhere each warp stores its rows alone.
    assert ("OUTPUT_BARRIER" in values) == ("OUTPUT_BARRIER" in rows) == (place == "over_q")
    if place == "over_q":
        assert rows.pop("OUTPUT_BARRIER") == (str(values["OUTPUT_BARRIER"]), 128 * values["CONSUMERS"])
        assert values["OUTPUT_BARRIER"] > 0  # which is the CTA's own
    assert ("MERGE_BARRIER" in values) == plan(stem).by_warps
    if plan(stem).by_warps:
        assert rows.pop("MERGE_BARRIER") == (str(values["MERGE_BARRIER"]), 128 * values["CONSUMERS"])
    assert ("TURN_BARRIER" in values) == plan(stem).schedule.ping_pong
    if plan(stem).schedule.ping_pong:
        first = values["TURN_BARRIER"]
        assert rows.pop("TURN_BARRIER") == (f"{first} to {first + values['CONSUMERS'] - 1}", values["TURN_THREADS"])
        assert first > values.get("OUTPUT_BARRIER", 0)
    assert rows == {}


@pytest.mark.parametrize("stem", STEMS)
def test_the_timeline_stands_in_the_module(stem: str) -> None:
    header = plan(stem).header
    assert "\n    ".join([f"\n{header.timeline_title}", *header.timeline]) in source(stem)
