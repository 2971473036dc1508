"""What kernels have to do, against numbers derived by hand and against masks written out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering import attention_stems, changed, named, plans

from fa3gen.base.errors import UserError
from fa3gen.design import footprint, work
from fa3gen.design.family import Shape
from fa3gen.design.work import Problem
from fa3gen.generate.plan import make_plan
from fa3gen.spec.model import Spec


def spec(stem: str) -> Spec:
    return named(stem).spec


def square(stem: str, length: int, heads: int = 1, batch: int = 1) -> Problem:
    return Problem(spec(stem), Shape(batch, length, length, heads, heads))


def test_a_step_of_128_x_128_at_head_dim_128() -> None:
    step = work.step(spec("ping_pong_d128"))
    assert step.flops == step.tensor_flops == 2 * 128 * 128 * 256
    # Two warpgroups; 128 / 16 instructions in depth, for each product.
    assert (step.wgmma_qk, step.wgmma_pv) == (16, 16)
    # 256 threads with 2 rows x 32 columns, and the factor of each row: 256 x 66.
    assert step.exponentials == 16896
    assert step.scalar_fmas == 0
    # K and V, 128 x 128 x 2 bytes each, in two boxes of 64 columns each.
    assert (step.l2_bytes, step.tma_loads) == (65536, 4)
    # Written: 65536. Q K^T: 16 x (64 x 16 + 128 x 16) x 2 = 98304. P V without A: 16 x 128 x 16 x 2 = 65536.
    assert step.smem_bytes == 65536 + 98304 + 65536


def test_a_capped_score_takes_a_tanh_as_well() -> None:
    first = spec("fwd_d128_softcap_causal")
    online = changed("fwd_d128_softcap_causal", softmax={"row_max": "online"}).spec
    plain, capped = work.step(spec("fwd_d128_causal")), work.step(online)
    # Two products and tanhs, 64 a thread, on 8 warps.
    assert capped.exponentials - plain.exponentials == work.tanhs(online) == 128 * 128
    # Relative to a first maximum no row has a factor: 256 threads with 2 rows.
    assert capped.exponentials - work.step(first).exponentials == 2 * 256 and work.tanhs(first) == work.tanhs(online)
    assert capped.instructions - plain.instructions == 8 * 2 * 64
    assert work.tanhs(spec("fwd_d128_causal")) == 0


def test_a_step_with_p_through_shared_memory() -> None:
    step = work.step(spec("k4_smem_d64"))
    # Tile 128 x 64. Written by TMA: 2 x 64 x 64 x 2 = 16384; each product 8 x (64 x 16 + 64 x 16) x 2 = 32768; P is
    # written, 128 x 64 x 2 = 16384.
    assert step.smem_bytes == 16384 + 2 * 32768 + 16384


def test_a_step_on_scalars() -> None:
    step = work.step(spec("k2_d64"))
    assert (step.tensor_flops, step.scalar_fmas) == (0, 64 * 64 * 128)
    assert step.flops == 2 * step.scalar_fmas
    # 128 threads with 8 rows, 4 columns of each and its factor.
    assert step.exponentials == 128 * 8 * 5
    assert step.tma_loads == 0


def test_a_step_of_the_naive_kernels() -> None:
    step = work.step(spec("k1_d64"))
    assert (step.flops, step.exponentials) == (2 * 16 * 16 * 128, 256)


@pytest.mark.parametrize("stem", attention_stems())
def test_products_are_those_of_the_plan(stem: str) -> None:
    plan, step = plans()[stem], work.step(spec(stem))
    assert step.wgmma_qk == plan.qk.steps * plan.tile.warpgroups
    assert step.wgmma_pv == plan.pv.steps * footprint.stripes(spec(stem)) * plan.tile.warpgroups
    products = [(plan.qk, step.wgmma_qk), (plan.pv, step.wgmma_pv)]
    if plan.by_warps:  # one m16n8k16 for each group of a warp's keys and slice of dims, and the other way round
        keys = spec(stem).tile.kv // (4 * plan.tile.warpgroups)
        counts = (keys // 8 * (dim // 16) for dim in (plan.problem.head_dim, plan.problem.v_dim))
        flops = sum(4 * plan.tile.warpgroups * count * 2 * 16 * 8 * 16 for count in counts)
    else:
        flops = sum(2 * count * m * n * k for product, count in products for m, n, k in [product.instruction])
    assert flops == step.tensor_flops


@pytest.mark.parametrize(
    ("stem", "loads", "stores"),
    # 128 columns are two boxes, 64 one. Persistent kernels store by warp: 8 warps, 2 boxes.
    [
        ("k6_d128", 2, 2),
        ("k6_d64", 1, 1),
        ("fwd_d128", 2, 16),
        ("fwd_d256", 4, 0),
        ("k3_2_d64", 1, 0),
        ("k2_d64", 0, 0),
    ],
)
def test_copies_of_a_tile_of_queries(stem: str, loads: int, stores: int) -> None:
    tile = work.query_tile(spec(stem))
    assert (tile.tma_loads, tile.tma_stores) == (loads, stores)


def tile_of(stem: str, q: int, kv: int) -> Spec:
    """A causal spec with another tile; how it is served is of no interest here."""
    base = spec(stem)
    return base.model_copy(update={"tile": base.tile.model_copy(update={"q": q, "kv": kv})})


@pytest.mark.parametrize(
    ("q", "kv", "ratios"),
    [
        # At 512: 1 + 2 + 3 + 4 = 10 tiles of 128 x 128 over 512 x 512 / 2 is 1.25.
        (128, 128, (1.25, 1.125, 1.03, 1.01)),
        (64, 64, (1.125, 1.06, 1.02, 1.00)),
        # At 512: 2 + 3 + 4 = 9 tiles of 192 x 128 over 131072.
        (192, 128, (1.6875, 1.50, 1.125, 1.03)),
        (128, 176, (1.55, 1.29, 1.07, 1.02)),
    ],
)
def test_causal_work_beyond_the_ideal(q: int, kv: int, ratios: tuple[float, ...]) -> None:
    """The table of overcompute at sequence lengths 512, 1k, 4k and 16k."""
    causal = tile_of("k6_d128_causal", q, kv)
    for length, ratio in zip((512, 1024, 4096, 16384), ratios, strict=True):
        problem = Problem(causal, Shape(1, length, length, 1, 1))
        assert problem.over_compute == pytest.approx(ratio, abs=0.005), length


def test_steps_of_a_causal_problem() -> None:
    problem = square("ping_pong_d128_causal", 512, heads=16, batch=2)
    assert (problem.tiles, problem.visited) == (4 * 32, 10 * 32)
    # One tile on the diagonal for each tile of queries; 6 of 16 above it.
    assert (problem.masked, problem.skipped) == (4 * 32, 6 * 32)
    assert problem.flops == 2 * 32 * 512 * 256 * 256


def test_unmasked_problem() -> None:
    problem = square("ping_pong_d64", 512)
    # 512 = 2 x 192 + 128: three tiles of queries.
    assert (problem.tiles, problem.visited, problem.masked, problem.skipped) == (3, 12, 0, 0)
    assert problem.over_compute == pytest.approx(576 / 512)
    # Q, K, V and O of 512 x 64 x 2 bytes, LSE of 512 floats.
    assert problem.hbm_bytes == 4 * 65536 + 2048
    assert problem.intensity == pytest.approx(4 * 512 * 512 * 64 / 264192)


def test_naive_kernels_move_s_and_p_through_memory() -> None:
    assert square("k1_d64", 512).hbm_bytes == 4 * 65536 + 2048 + 5 * 512 * 512 * 4


def test_packed_heads_share_tiles() -> None:
    packed = Problem(spec("fwd_d128_pack4_causal"), Shape(1, 64, 64, 8, 2))
    # 128 rows are 32 positions of 4 heads: two tiles for each of two groups.
    assert (packed.tiles, packed.visited) == (4, 4)


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(6, 4), (6, 2), (2, 2)])
def test_heads_that_a_packed_module_does_not_take(heads_q: int, heads_kv: int) -> None:
    with pytest.raises(UserError, match="heads"):
        Problem(spec("fwd_d128_pack4_causal"), Shape(1, 64, 64, heads_q, heads_kv))


def visible(mask: object, row: int, key: int, shift: int) -> bool:
    kind = getattr(mask, "kind", "")
    distance = key - row - shift
    if kind == "causal":
        return distance <= 0
    if kind == "window":
        return -getattr(mask, "left", 0) <= distance <= getattr(mask, "right", 0)
    return True


@settings(deadline=None, max_examples=60)
@given(
    stem=st.sampled_from(["k6_d128", "k2_d64_causal", "k6_d128_causal", "k4_2_window_d64_window200_70"]),
    seq_q=st.integers(1, 300),
    seq_k=st.integers(1, 500),
)
def test_tiles_visited_and_masked_are_those_that_the_mask_needs(stem: str, seq_q: int, seq_k: int) -> None:
    """Against the mask written out: every tile with a visible pair is visited, only tiles without any hidden one are
    not masked. Rows past the end of the queries count as rows."""
    module = spec(stem)
    q, kv = module.tile.q, module.tile.kv
    problem = Problem(module, Shape(1, seq_q, seq_k, 1, 1))
    for block, tiles in enumerate(problem.of_lengths[seq_q, seq_k]):
        rows = range(block * q, (block + 1) * q)
        for number in range(-(-seq_k // kv)):
            keys = range(number * kv, (number + 1) * kv)
            corners = [
                key < seq_k and visible(module.mask, row, key, seq_k - seq_q)
                for row in (rows[0], rows[-1])
                for key in (keys[0], keys[-1])
            ]
            inside = tiles.start <= number < tiles.end
            if all(corners):
                assert inside and tiles.full_start <= number < tiles.full_end
            elif any(corners):
                assert inside
            if inside and tiles.full_start <= number < tiles.full_end:
                assert all(corners)


def test_default_heads() -> None:
    assert work.default_heads(spec("fwd_d64")) == (32, 32)
    assert work.default_heads(spec("fwd_d96")) == (21, 21)
    assert work.default_heads(spec("fwd_d192")) == (10, 10)
    assert work.default_heads(spec("fwd_d64_pack8_window")) == (32, 4)


def test_rescaling_now_and_then_saves_instructions() -> None:
    lazy = changed("fwd_d128", softmax={"rescale_above": 8}).spec
    assert work.step(lazy).instructions < work.step(spec("fwd_d128")).instructions
    assert make_plan(changed("fwd_d128", softmax={"rescale_above": 8})).softmax.lazy


def test_packed_sequences_move_their_lengths_too() -> None:
    """Three sequences of one length: the dense ones' bytes, and 4 offsets and 3 lengths, of queries and of keys."""
    shape = Shape(3, 200, 300, 8, 2)
    dense, packed = (Problem(named(stem).spec, shape) for stem in ("fwd_d128_causal", "fwd_packed_d128_causal"))
    assert packed.flops == dense.flops
    assert packed.hbm_bytes == dense.hbm_bytes + 2 * (4 + 3) * 4


def test_tiles_of_keys_that_begin_with_a_window() -> None:
    """Queries 1280 to 1407 see keys 768 to 1407: eight tiles of 80 from the first one on, nine counted from key 0."""

    def found(stem: str, kv_from: str, left: int) -> work.KeyTiles:
        spec = changed(stem, tile={"kv": 80, "kv_from": kv_from}).spec
        return work.key_tiles(spec, (4096, 4096), 10, (left, 0))

    assert found("fwd_d256_any_window", "window", 512) == work.KeyTiles(0, 8, 2, 6, first_key=768)
    assert found("fwd_d256_any_window", "first_key", 512) == work.KeyTiles(9, 18, 12, 16)
    # All keys, where the window reaches that far; and whole boxes, where keys lie in pages.
    assert found("fwd_d256_any_window", "window", 4000).first_key == 0
    assert found("fwd_packed_any_window_d256", "window", 507).first_key == 773
    assert found("fwd_paged_any_window_d256", "window", 507).first_key == 768
    assert found("fwd_paged_rows_any_window_d256", "window", 507).first_key == 773
