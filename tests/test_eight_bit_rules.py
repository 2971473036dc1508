"""The rules about attention of 8-bit operands: each by hand, and what a spec that breaks one is told."""

from __future__ import annotations

from typing import Any

import pytest
from rendering import spec_of, spec_with

from fa3gen.design import footprint, rules
from fa3gen.design.rules import Violation, eight_bits
from fa3gen.spec.model import Forward


def violations(spec: Forward) -> dict[str, str]:
    """What is said, by field."""
    return {violation.field: violation.message for violation in rules.check(spec)}


def test_eight_bit_major() -> None:
    assert eight_bits.eight_bit_major("qk.b.major", "qk", "K", "k") is None
    assert eight_bits.eight_bit_major("qk.b.major", "qk", "K", "mn") == Violation(
        "qk.b.major",
        "WGMMA transposes operands of 16 bits only, and K of 8 bits has to lie along what qk sums over; use k and give "
        "a q or k whose head dim is contiguous",
    )
    told = violations(spec_with("k7_v_k_d128", pv={"b": {"source": "smem", "major": "mn"}}))
    assert told["pv.b.major"].endswith(
        "use k, with smem.vt, so that warps transpose V, or without, for a v whose sequence is contiguous"
    )


@pytest.mark.parametrize(
    ("field", "parts", "way_out"),
    [
        ("schedule.overlap", {"schedule": {"kind": "ping_pong", "overlap": False}}, "use true"),
        ("scheduler", {"scheduler": "grid"}, "use single_tile or static or stream_k or dynamic"),
        ("outputs.o", {"outputs": {"o": "direct"}}, "use own_buffer"),
        ("softmax.rescale_above", {"softmax": {"rescale_above": 4}}, "use null"),
    ],
)
def test_eight_bit_kernel(field: str, parts: dict[str, Any], way_out: str) -> None:
    assert_not_rendered(field, violations(spec_with("k7_d128", **parts)), way_out)


@pytest.mark.parametrize(
    ("field", "parts", "way_out"),
    [
        ("tile.transposers", {"tile": {"transposers": 4}}, "use 2"),
        ("smem.vt", {"smem": {"vt": None}, "tile": {"transposers": 4}}, "use 128B or 64B or 32B"),
        ("tile.pack_heads", {"tile": {"pack_heads": 4}}, "use 1"),
        ("split", {"scheduler": "even"}, "use split"),
        ("load.q_stages", {"load": {"q_stages": 1}}, "use 2"),
    ],
)
def test_eight_bit_kernel_of_packed_sequences(field: str, parts: dict[str, Any], way_out: str) -> None:
    """Two warps transpose V, beside one that loads and one that finds tiles; parts leave straight from registers."""
    assert_not_rendered(field, violations(spec_with("fwd_fp8_packed_d128", **parts)), way_out)


def assert_not_rendered(field: str, told: dict[str, str], way_out: str) -> None:
    assert told[field].endswith(f"is not rendered; {way_out}, or dtype bf16 or fp16")
    assert eight_bits.eight_bit_kernel(field, None, (None,)) is None


def test_transposed_operand() -> None:
    assert eight_bits.transposed_operand("128B", "e4m3") is None
    assert eight_bits.transposed_operand(None, "bf16") is None
    assert eight_bits.transposed_operand("128B", "bf16") == Violation(
        "smem.vt",
        "WGMMA reads V of bf16 as it was loaded, MN-major; leave smem.vt out, or use dtype e4m3",
    )


def test_transposed_tile() -> None:
    # 128 columns: eight blocks beside each other, two for each of four warps; 64: one; 96: six, three for each of two.
    for columns, warps in ((128, 4), (64, 4), (96, 2), (32, 2)):
        assert eight_bits.transposed_tile(96, columns, warps) is None
    assert eight_bits.transposed_tile(112, 128, 4) == Violation(
        "tile.kv", "warps transpose blocks of 32 keys, and 112 keys are no whole number of these; use a multiple of 32"
    )
    refused = "warps transpose blocks of 16 columns, and {} columns have no whole number for each; use 2"
    assert eight_bits.transposed_tile(128, 96, 4) == Violation("tile.transposers", f"4 {refused.format(96)}")
    assert eight_bits.transposed_tile(128, 80, 2) == Violation(
        "tile.transposers", f"2 {refused.format(80)} with a head dim that is a multiple of 32"
    )
    assert footprint.transposed_blocks(spec_of("k7_d128")) == 8


def test_rows_gathered_beside_transposers() -> None:
    """One warp has rows of K and V: of two tiles it takes 56 registers, and the table read ahead; of one tile 40 do."""
    rows = {"page_rows": 1, "kv_stages": 4}
    two = spec_with("fwd_fp8_paged_d128_causal", tile={"kv": 96}, load=rows, smem={"vt": "32B"})
    one = spec_with("fwd_fp8_paged_d128_causal", load={"page_rows": 1})
    for spec, ahead, budget in ((two, 2, (56, 224)), (one, 1, (40, 232))):
        assert violations(spec) == {} and footprint.gathered_ahead(spec) == ahead
        assert footprint.register_budget(spec) == budget
        assert 3 * footprint.launch_registers(spec) == budget[0] + 2 * budget[1]
    few = spec_with("fwd_fp8_paged_decode_d64_causal", load={"page_rows": 1}, smem={"k": "32B", "v": "32B"})
    assert {field: message.split(";")[0] for field, message in violations(few).items()} == {
        f"smem.{name}": "single rows of 64 bytes are copied to where swizzle 64B has them, not 32B" for name in "kv"
    }


def test_transposing_warps() -> None:
    assert eight_bits.transposing_warps(2, True) is None and eight_bits.transposing_warps(4, False) is None
    told = violations(spec_with("k6_d128", tile={"transposers": 2}))
    assert told == {
        "tile.transposers": "2 warps are to transpose V, and without smem.vt nobody does; leave it out, or with "
        "dtype e4m3 give smem.vt"
    }


def test_two_levels() -> None:
    assert eight_bits.two_levels(1, "e4m3", 64) is None and eight_bits.two_levels(4, "e4m3", None) is None
    told = violations(spec_with("fwd_fp8_d256_two_levels", accumulate={"promote_every": 4}))
    assert told == {
        "accumulate.promote_every": "sums of 4 tiles of keys stay in registers, in which stripes of 64 columns take "
        "turns; use 1, or leave accumulate.columns out"
    }
    told = violations(spec_with("k6_d128", accumulate={"promote_every": 1}))
    assert told == {
        "accumulate": "sums of bf16 keep enough bits in the tensor core; leave accumulate out, or use dtype e4m3"
    }


def test_mixed_eight_bits() -> None:
    assert eight_bits.mixed_eight_bits(None, 1) is None and eight_bits.mixed_eight_bits("e5m2", 1) is None
    assert violations(spec_with("k7_two_levels_d128", kv={"dtype": "e4m3"})) == {
        "kv.dtype": "k and v have dtype e4m3, which is that of the problem; leave it out, or use e5m2"
    }
    assert violations(spec_with("k7_e5m2_d128", kv={"warpgroups": 2, "stages": 2})) == {
        "kv.warpgroups": "2 warpgroups are to convert K and V, which are multiplied as they are; leave it out",
        "kv.stages": "2 stages of tiles that are converted, and none are; leave stages out, or give kv.dtype beside "
        "dtype bf16 or fp16",
    }
    spec = spec_of("k7_e5m2_d128")
    assert footprint.mixed(spec) and not footprint.converts(spec) and not footprint.mixed(spec_of("k7_d128"))


def test_promoted_stripes() -> None:
    assert eight_bits.promoted_stripes(64, 64, 256) is None
    told = violations(spec_with("fwd_fp8_d256_two_levels", accumulate={"promote_every": 1, "columns": 128}))
    assert told == {
        "accumulate.columns": "P V of 128 columns is to take turns with S, of 64 keys, in the same registers; use 64, "
        "or leave it out: all columns are promoted at once"
    }
    for v_dim in (64, 224):
        assert eight_bits.promoted_stripes(64, 64, v_dim) == Violation(
            "accumulate.columns",
            f"{v_dim} columns of O are not two or more stripes of 64; use another tile.kv, and as many, or leave it "
            "out: all columns are promoted at once",
        )


def test_striped_kernel() -> None:
    assert eight_bits.striped_kernel("schedule.kind", "warp_specialized", "warp_specialized") is None
    schedule = {"kind": "ping_pong", "overlap": True}
    told = violations(spec_with("fwd_fp8_d256_two_levels", schedule=schedule, softmax={"exp_before_wait": 8}))
    assert told == {
        "schedule.kind": "with accumulate.columns ping_pong is not rendered; use warp_specialized, or leave "
        "columns out",
        "softmax.exp_before_wait": "with accumulate.columns 8 is not rendered; use null, or leave columns out",
    }


def test_registers_of_stripes() -> None:
    """128 of O, 32 of each stripe and S, 8 of P, 12 others: 212 of 232, where 256 columns at once would take 308."""
    spec = spec_of("fwd_fp8_d256_two_levels")
    assert dict(footprint.registers_per_thread(spec)) == {
        **{"O": 128, "P V of a step": 32, "S": 32, "P": 8, "other": 12}
    }
    told = violations(spec_with("fwd_fp8_d256_two_levels", accumulate={"columns": None}))
    assert "O 128 + P V of a step 128" in told["tile.kv"]


def test_registers_of_two_levels() -> None:
    """64 each of O, P V of a step and S, 16 of P, 12 others: 220, and 4 to spare are the 224 of a consumer."""
    spec = spec_of("k7_two_levels_d128")
    held = footprint.registers_per_thread(spec)
    assert dict(held) == {"O": 64, "P V of a step": 64, "S": 64, "P": 16, "other": 12}
    assert footprint.register_budget(spec) == (32, 224)
    assert 32 + footprint.transposer_registers(spec) + 2 * 224 == 4 * footprint.launch_registers(spec)
    told = violations(spec_with("k7_two_levels_d128", tile={"kv": 160}, smem={"v": "128B", "vt": "32B"}))
    assert "S 80 + P 20" in told["tile.kv"]


def test_scales_of_blocks() -> None:
    assert eight_bits.scales_of_blocks("head", "bf16") is None
    assert eight_bits.scales_of_blocks("block", "e4m3") is None
    told = violations(spec_with("fwd_d128", problem={"scales": "block"}))
    assert told == {"problem.scales": "q and k of bf16 have no factors; leave scales out, or use dtype e4m3"}


def test_rows_of_block() -> None:
    """A tile lies in one block: 64 and 128 rows do, 96 and 192 do not."""
    assert [rows for rows in (64, 96, 128, 192) if eight_bits.rows_of_block("tile.kv", rows) is None] == [64, 128]
    told = violations(spec_with("k8_d64", tile={"kv": 160}, smem={"vt": "32B"}))
    assert told["tile.kv"] == (
        "160 rows would lie in several blocks of 128 rows, with a factor each; use a divisor of 128, or scales: head"
    )
    assert "tile.q" in violations(spec_with("k8_d64", tile={"q": 192, "warpgroups": 3}))
    assert violations(spec_with("k8_d64", tile={"kv": 64}, smem={"vt": "64B"})) == {}


@pytest.mark.parametrize(
    ("field", "parts", "message"),
    [
        ("mask", {"mask": {"kind": "window", "left": 64, "right": 0}}, "with scales: block window is not rendered"),
        (
            "accumulate",
            {"accumulate": None},
            "with scales: block V of each tile of keys has a factor, by which threads",
        ),
        ("accumulate", {"accumulate": {"promote_every": 4}}, "to O; use accumulate: {promote_every: 1}, or scales"),
        ("problem.layout", {"problem": {"layout": "packed"}}, "with scales: block packed is not rendered; use dense"),
        (
            "scheduler",
            {"scheduler": "stream_k", "load": {"q_stages": 2}},
            "stream_k is not rendered; use single_tile or",
        ),
        ("softmax.sink", {"softmax": {"sink": True}}, "with scales: block true is not rendered; use false"),
        ("softmax.softcap", {"softmax": {"softcap": True}}, "with scales: block true is not rendered; use false"),
    ],
)
def test_block_scale_kernel(field: str, parts: dict[str, Any], message: str) -> None:
    assert eight_bits.block_scale_kernel(field, "one", ("one", "other")) is None
    told = violations(spec_with("k8_d128", **parts))
    assert message in told[field] and told[field].endswith(", or scales: head")


def test_sums_of_blocks() -> None:
    """Threads add P V of each tile of keys to O, all columns at once."""
    assert eight_bits.sums_of_blocks(1, 1) is None
    for promote_every, stripes in ((0, 1), (4, 1), (1, 4)):
        found = eight_bits.sums_of_blocks(promote_every, stripes)
        assert found is not None and found.field == "accumulate" and "or scales: head" in found.message
    assert "accumulate" in violations(spec_with("k8_d64", accumulate={"promote_every": 4}))


def test_permuted_keys() -> None:
    legal, anywhere = ("permuted", "e4m3", None, "dense", "first_key"), "anywhere within 16"
    assert eight_bits.permuted_keys(*legal) is None
    assert eight_bits.permuted_keys("in_order", "bf16", "128B", "paged", "window") is None
    for number, value, message in (
        (1, "bf16", "P of bf16 is read as A operand as it is; leave v_keys out, or use dtype e4m3"),
        (2, "128B", "warps that transpose V put its keys in P's order themselves; leave v_keys out, or smem.vt"),
        (3, "packed", f"sequences of layout packed begin {anywhere} keys; use in_order, or layout dense"),
        (4, "window", f"tiles of keys that begin with a window begin {anywhere}; use in_order, or kv_from: first_key"),
    ):
        facts = [*legal[:number], value, *legal[number + 1 :]]
        assert eight_bits.permuted_keys(*facts) == Violation("problem.v_keys", message)
    found = rules.check(spec_with("fwd_fp8_d128", problem={"v_keys": "permuted"}))
    assert [violation.field for violation in found] == ["problem.v_keys"]
