"""Facts from PTX and SASS against counts made by hand on real compiler output, and the comparison.

tests/data/*.ptx and *.sass are what DSL 4.8.1 (ptxas 12.9.83) makes of the kernels beside them, with the kernel's long
name replaced by the file's; rs_gemm_touched is rs_gemm with TOUCH_A = True, row_max_careless is row_max with
CARELESS = True.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fa3gen.compile.census import Census, Mismatch, compare, parse_ptxas_log, rows, take_census
from fa3gen.compile.census.host import dynamic_smem_by_kernel
from fa3gen.compile.census.ptx import PtxFacts, Wgmma, count_instructions, parse_ptx
from fa3gen.compile.census.sass import Instruction, Loop, find_loops, lost_operands, one_bank, parse_sass, store_kind
from fa3gen.compile.toolchain import Resources
from fa3gen.generate.expected import Expectation, SassExpectation

DATA = Path(__file__).parent / "data"
REGISTER_A = Wgmma(64, 64, 16, "registers", "f32", "bf16", "bf16")
SMEM_A = Wgmma(64, 64, 16, "smem", "f32", "bf16", "bf16")

SERIALIZED_LOG = """\
\x1b[96mremark[ptxas info]:\x1b[0m ptxas output: ptxas info    : (C7519) warpgroup.arrive is injected in around \
line 227 by compiler to allow use of registers in GMMA in function 'rs_gemm_touched'
ptxas info    : (C7513) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma \
instructions defining input registers of a wgmma between start and end of the pipeline stage in the function \
'rs_gemm_touched'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'rs_gemm_touched' for 'sm_90a'
ptxas info    : Function properties for rs_gemm_touched
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 66 registers, used 1 barriers
"""

# With spills the DSL sets the same lines as a wrapped and indented block.
SPILL_LOG = """\
\x1b[96mremark[ptxas]:\x1b[0m ptxas detected register spills

  --> kernels.py:8:15
   |
>  8 |         r[i] = a[t * 160 + i]
     |               ^
  \x1b[96mremark:\x1b[0m Spilled values are placed in local memory and can add memory traffic and latency. ptxas
          reports spill usage at kernel granularity.

          ptxas output:
          ptxas info    : (C7517) warpgroup.wait is injected in around line 142 by compiler to
          allow use of registers defined by GMMA in function 'spiller'
          ptxas info    : Compiling entry function 'scale' for 'sm_90a'
          ptxas info    : Function properties for scale
          ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
          ptxas info    : Compiling entry function
          'spiller' for 'sm_90a'
          ptxas info    : Function properties for spiller
          ptxas         .     792 bytes stack frame, 900 bytes spill stores, 904 bytes spill loads
          ptxas info    : Used 64 registers, used 1 barriers, 792 bytes cumulative stack size
  \x1b[92msuggestion:\x1b[0m reduce live ranges in the reported kernel
"""

HOST_MODULE = """\
  llvm.func @_cudaLaunchKernelEx(!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
  llvm.func @cutlass_launch(%arg0: !llvm.ptr) -> i32 attributes {llvm.emit_c_interface} {
    %13 = llvm.mlir.constant(0 : i32) : i32
    %14 = llvm.mlir.constant(1 : i32) : i32
    %16 = llvm.mlir.constant(41984 : i64) : i64
    %21 = llvm.mlir.constant(7 : i64) : i64
    %23 = llvm.alloca %14 x i64 {alignment = 64 : i64} : (i32) -> !llvm.ptr
    %28 = llvm.getelementptr %23[0, 2] : (!llvm.ptr) -> !llvm.ptr, !llvm.array<16 x i64>
    llvm.store %21, %28 : i64, !llvm.ptr
    %79 = llvm.alloca %14 x !llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)> : (i32) -> !llvm.ptr
    %85 = llvm.getelementptr %79[0, 2] : (!llvm.ptr) -> !llvm.ptr, !llvm.struct<(array<3 x i32>, i64)>
    llvm.store %16, %85 : i64, !llvm.ptr
    %86 = llvm.getelementptr %79[0, 0, 0] : (!llvm.ptr) -> !llvm.ptr, !llvm.struct<(array<3 x i32>, i64)>
    llvm.store %14, %86 : i32, !llvm.ptr
    %91 = llvm.alloca %14 x !llvm.array<1 x ptr> : (i32) -> !llvm.ptr
    %92 = llvm.getelementptr %91[0, 0] : (!llvm.ptr) -> !llvm.ptr, !llvm.array<1 x ptr>
    llvm.store %79, %92 : !llvm.ptr, !llvm.ptr
    %135 = llvm.getelementptr %91[0, 0] : (!llvm.ptr) -> !llvm.ptr, !llvm.array<1 x ptr>
    %136 = llvm.load %135 : !llvm.ptr -> !llvm.ptr
    %180 = llvm.mlir.addressof @kernels_tma_gemm : !llvm.ptr
    %181 = llvm.load %180 : !llvm.ptr -> !llvm.ptr
    %182 = llvm.call @_cudaLaunchKernelEx(%136, %181, %139) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
    llvm.return %13 : i32
  }
"""


def read(name: str) -> str:
    return (DATA / name).read_text()


def census_of(stem: str, resources: Resources, log: str = "", host: str = "") -> Census:
    return take_census(read(f"{stem}.ptx"), read(f"{stem}.sass"), {stem: resources}, log, host)


@pytest.fixture(scope="module")
def tma() -> Census:
    return census_of("tma_gemm", Resources(registers=232, stack=0, shared=1024, local=0), host=HOST_MODULE)


@pytest.fixture(scope="module")
def clean() -> Census:
    return census_of("rs_gemm", Resources(registers=74, stack=0, shared=1024, local=0))


@pytest.fixture(scope="module")
def serialized() -> Census:
    return census_of("rs_gemm_touched", Resources(registers=66, stack=0, shared=1024, local=0), log=SERIALIZED_LOG)


# PTX


def test_ptx_of_a_tma_kernel_counted_by_hand() -> None:
    (kernel,) = parse_ptx(read("tma_gemm.ptx"))
    assert (kernel.name, kernel.threads) == ("tma_gemm", 256)
    assert kernel.facts == PtxFacts(
        instructions=368,
        wgmma={SMEM_A: 8},
        wgmma_fences=1,
        wgmma_commits=2,
        wgmma_waits=2,
        tma_loads={2: 2},
        tma_stores={2: 1},
        bulk_commits=1,
        bulk_waits=1,
        mbarrier_inits=4,
        mbarrier_arrives=1,
        mbarrier_expect_tx=1,
        mbarrier_waits=4,
        bar_syncs=3,
        stmatrix=4,
        setmaxnreg={"dec 40": 1, "inc 232": 1},
        proxy_fences=1,
        ex2=32,
    )


def test_ptx_tells_a_from_registers() -> None:
    (kernel,) = parse_ptx(read("rs_gemm.ptx"))
    assert kernel.threads == 128
    assert kernel.facts == PtxFacts(
        instructions=204,
        wgmma={REGISTER_A: 4},
        wgmma_fences=1,
        wgmma_commits=1,
        wgmma_waits=2,
        bar_syncs=1,
        proxy_fences=1,
    )


def test_ptx_instructions_that_the_excerpts_lack() -> None:
    body = """
    .reg .b32 %r<9>;
    .pragma "nounroll";
$L__BB0_1:
    cp.async.cg.shared.global [%r1], [%rd1], 16;
    @%p1 cp.async.cg.shared.global.L2::128B [%r1+16], [%rd1+16], 16, %r3;
    @!%p1 cp.async.ca.shared.global [%r2], [%rd2], 4;
    cp.async.commit_group;
    cp.async.wait_group 1;
    cp.async.wait_all;
    cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r1, %r2}], [%r3];
    cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%rd1, {%r1, %r2}], [%r1];
    cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%rd1, {%r1}];
    cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd1, {%r1}], [%r1];
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r5];
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1, %r2, %r3, %r4}, {%r1, %r2, %r3, %r4}, {%r5, %r6},
        {%r1, %r2, %r3, %r4};
    mbarrier.test_wait.parity.shared.b64 %p1, [%r1], %r2;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 4096;
    mbarrier.arrive.release.cta.shared::cta.b64 _, [%r1];
    fence.mbarrier_init.release.cluster;
    fence.proxy.async.shared::cta;
    bar.warp.sync -1;
    barrier.cta.sync 1, 128;
    bar.arrive 2, 256;
    bar.cta.red.popc.u32 %r1, 0, %p1;
    { .reg .pred p; setp.ne.b32 p, %r1, 0;
    wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 {%r1, %r2}, %rd1, %rd2, p; }
    wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e5m2
        {%r1, %r2}, {%r3, %r4, %r5, %r6}, %rd2, p, 1, 1;
    """
    facts = count_instructions(body)
    assert facts == PtxFacts(
        instructions=24,
        wgmma={
            Wgmma(64, 8, 16, "smem", "f16", "f16", "f16"): 1,
            Wgmma(64, 16, 32, "registers", "f32", "e4m3", "e5m2"): 1,
        },
        mma=1,
        tma_loads={4: 1},
        tma_stores={4: 1, 2: 1},
        tma_prefetches=1,
        cp_async={16: 2, 4: 1},
        cp_async_commits=1,
        cp_async_waits=2,
        mbarrier_arrives=1,
        mbarrier_expect_tx=1,
        mbarrier_waits=1,
        bar_syncs=1,
        bar_arrives=1,
        warp_syncs=1,
        ldmatrix=1,
        proxy_fences=1,
    )


def test_ptx_ignores_comments_and_debug_lines_and_keeps_kernels_apart() -> None:
    text = """
.version 8.8
.file 1 "a; ex2.approx.ftz.f32 b"
.visible .entry first( .param .b64 p )
.reqntid 32, 4, 2
{
    .loc 1 12 0 // ex2.approx.ftz.f32 %f1, %f2;
    ex2.approx.ftz.f32 %f1, %f2; /* bar.sync 0; */
    ret;
}
.visible .entry second()
{
    bar.sync 0;
    tanh.approx.f32 %f1, %f2;
    ret;
}
"""
    first, second = parse_ptx(text)
    assert (first.name, first.threads, first.facts) == ("first", 256, PtxFacts(instructions=2, ex2=1))
    assert (second.name, second.threads, second.facts) == (
        "second",
        None,
        PtxFacts(instructions=3, bar_syncs=1, tanh=1),
    )


# SASS


def test_sass_of_a_tma_kernel_counted_by_hand() -> None:
    (kernel,) = parse_sass(read("tma_gemm.sass"))
    facts = kernel.facts()
    assert kernel.name == "tma_gemm"
    assert facts.instructions == 351  # 368 lines, 17 of them NOP
    assert (facts.gmma, facts.gmma_group_ends, facts.warpgroup_arrives, facts.warpgroup_waits) == (8, 2, 1, 2)
    assert (facts.tma_loads, facts.tma_stores, facts.mbarrier_ops, facts.register_reallocations) == (2, 1, 17, 2)
    assert (facts.ex2, facts.fsel, facts.fsetp, facts.fmnmx, facts.mma) == (32, 0, 0, 0, 0)
    assert (facts.local_loads, facts.local_stores) == (0, 0)
    assert (facts.global_stores, facts.shared_stores) == ({"STG.64": 16, "UTMASTG": 1}, {"STSM.4": 4})
    assert facts.opcodes["STSM"] == 4 and facts.opcodes["NANOSLEEP"] == 4 and facts.opcodes["STG"] == 16
    assert sum(facts.opcodes.values()) == 351


def test_loops_of_a_tma_kernel_counted_by_hand() -> None:
    (kernel,) = parse_sass(read("tma_gemm.sass"))
    loops = kernel.facts().loops
    working = [loop for loop in loops if not loop.waits]
    # The producer's loop and the consumer's. Their mbarrier waits spin out of line behind the kernel's end and count
    # for nothing here, nor do the jumps there and back.
    assert working == [
        Loop(0x240, depth=1, innermost=True, waits=False, instructions=32, gmma=0, ex2=0),
        Loop(0x7F0, depth=1, innermost=True, waits=False, instructions=90, gmma=8, ex2=32),
    ]
    # The producer's tail, setmaxnreg.inc, and the spins of the three waits.
    assert [(loop.address, loop.depth) for loop in loops if loop.waits] == [
        (0x470, 1),
        (0x4F0, 1),
        (0x14D0, 2),
        (0x1530, 1),
        (0x15C0, 2),
    ]


NESTED = """
.text.nested:
        /*0000*/                   HMMA.16816.F32.BF16 R4, R4, R8, R4 ;
.L_outer:
        /*0010*/                   BSSY B0, `(.L_join) ;
        /*0020*/               @P0 BRA `(.L_else) ;
.L_inner:
        /*0030*/                   MUFU.EX2 R2, R3 ;
        /*0040*/                   LDL R4, [R1] ;
        /*0050*/                   ISETP.NE.AND P1, PT, R2, R3, PT ;
        /*0060*/               @P1 BRA `(.L_inner) ;
        /*0070*/                   BSYNC B0 ;
.L_else:
        /*0080*/                   STL [R1], R4 ;
        /*0090*/                   BSYNC B0 ;
.L_join:
        /*00a0*/                   FSETP.GT.AND P2, PT, R2, R3, PT ;
        /*00b0*/                   FSEL R2, R3, R4, P2 ;
        /*00c0*/                   FMNMX R2, R3, R4, !PT ;
        /*00d0*/                   BRA.U !UP0, `(.L_outer) ;
        /*00e0*/                   EXIT ;
.L_trap:
        /*00f0*/                   BRA `(.L_trap);
        /*0100*/                   NOP;
"""


def test_nested_loops_and_reconvergence() -> None:
    (kernel,) = parse_sass(NESTED)
    facts = kernel.facts()
    assert facts.instructions == 16
    assert (facts.local_loads, facts.local_stores, facts.fsetp, facts.fsel, facts.fmnmx) == (1, 1, 1, 1, 1)
    assert (facts.mma, facts.gmma) == (1, 0)
    # The padding after EXIT jumps to itself, but nothing leads there.
    assert find_loops(kernel) == (
        Loop(0x10, depth=1, innermost=False, waits=False, instructions=13, gmma=0, ex2=1),
        Loop(0x30, depth=2, innermost=True, waits=False, instructions=4, gmma=0, ex2=1),
    )


BANKS = """.text.banks:
.L_1:
        /*0010*/                   FFMA R2, R4, R6, R2 ;
        /*0020*/                   FFMA R3, R5, -R7, R9 ;
        /*0030*/                   FFMA R2, R4, R5, R2 ;
        /*0040*/                   FFMA R2, R4, R4, R2 ;
        /*0050*/                   FFMA R2, R4, 2, R6 ;
        /*0060*/                   FFMA R2, R4, R6, RZ ;
        /*0070*/                   IADD3 R2, R4, R6, R8 ;
        /*0080*/                   FFMA R2, R4.reuse, R5, R2 ;
        /*0090*/                   FFMA R8, R4, R6, R8 ;
        /*00a0*/                   FFMA R2, R5, R4.reuse, R2 ;
        /*00b0*/                   FFMA R8, R4, R6, R8 ;
        /*00c0*/               @P0 BRA `(.L_1) ;
        /*00d0*/                   EXIT ;
"""


def test_multiply_adds_of_one_bank() -> None:
    """All even, all odd, and at 0xb0 all even again: R4 was left in the cache for the second operand, and is the first.
    At 0x90 it is where it was left."""
    (kernel,) = parse_sass(BANKS)
    assert one_bank(kernel) == {0x10, 0x20, 0xB0}
    [loop] = find_loops(kernel)
    assert (loop.ffma, loop.one_bank) == (10, 3)


KEPT = """.text.kept:
        /*0000*/                   LDSM.16.M88.4 R88, [R9] ;
.L_1:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR20], RZ, !UPT, gsb0 ;
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0030*/                   F2FP.BF16.F32.PACK_AB R90, R25, R24 ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R56, R88, gdesc[UR20].tnspB, R56, gsb0 ;
        /*0050*/              @!P0 BRA `(.L_1) ;
        /*0060*/                   EXIT ;
"""


def test_operands_that_a_loop_overwrites() -> None:
    """R88 to R91 are A of the first product, from before the loop; what packs P into R90 spoils the next turn."""
    (kernel,) = parse_sass(KEPT)
    assert lost_operands(kernel) == {90} and kernel.facts().lost_operands == 1
    # In registers of its own, or where the loop reads A anew, nothing is lost; nor where nobody multiplies with it.
    for old, new in (
        ("AB R90,", "AB R100,"),
        (".L_1:\n", ".L_1:\n        /*0008*/   LDSM.16.M88.4 R88, [R9] ;\n"),
        ("R88, gdesc", "R80, gdesc"),
    ):
        (kernel,) = parse_sass(KEPT.replace(old, new))
        assert lost_operands(kernel) == set()


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("STG.E", "STG.32"),
        ("STG.E.U16", "STG.16"),
        ("STG.E.U8.STRONG.GPU", "STG.8"),
        ("STG.E.EF.64", "STG.64"),
        ("STG.E.128", "STG.128"),
        ("ST.E.128", "ST.128"),
        ("STS.64", "STS.64"),
        ("STSM.16.M88.4", "STSM.4"),
        ("STSM.16.MT88.2", "STSM.2"),
        ("STSM.16.M88", "STSM.1"),
        ("UTMASTG.4D", "UTMASTG"),
    ],
)
def test_kinds_of_stores(opcode: str, kind: str) -> None:
    assert store_kind(Instruction(0, opcode, "[R1], R2", predicated=False)) == kind


def test_code_without_a_kernel_has_no_facts() -> None:
    assert parse_sass("\t.headerflags\n") == ()
    assert parse_ptx(".version 8.8\n") == ()
    assert parse_sass(".text.empty:\n")[0].facts().loops == ()


# Serialisation


def test_serialized_wgmma_is_found_with_and_without_the_word_of_ptxas(serialized: Census) -> None:
    sass_says = "SASS waits 4 times for 4 products, where the source commits 1 groups and waits 2 times"
    (kernel,) = serialized.kernels
    assert serialized.serialized_wgmma
    assert kernel.serialized[0].startswith("ptxas C7513: Potential Performance Loss: wgmma.mma_async instructions are")
    assert kernel.serialized[1:] == (sass_says,)
    assert (kernel.spill_stores, kernel.spill_loads) == (0, 0)
    silent = census_of("rs_gemm_touched", Resources(66, 0, 1024, 0))
    assert silent.kernels[0].serialized == (sass_says,)
    assert silent.kernels[0].spill_stores is None


def test_clean_kernels_are_not_taken_for_serialized(clean: Census, tma: Census) -> None:
    assert not clean.serialized_wgmma
    assert not tma.serialized_wgmma


def test_groups_of_one_product_are_not_serialized() -> None:
    ptx = read("rs_gemm.ptx")
    products = [f"\twgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned \t{i};\n" for i in range(3)]
    one_each = ptx.replace("\twgmma.commit_group", "".join(products) + "\twgmma.commit_group")
    sass = read("rs_gemm_touched.sass").replace("rs_gemm_touched", "rs_gemm")
    census = take_census(one_each, sass, {"rs_gemm": Resources(66, 0, 1024, 0)})
    assert (census.ptx.wgmma_commits, census.sass.gmma, census.sass.warpgroup_waits) == (4, 4, 4)
    assert not census.serialized_wgmma


def test_products_that_ptxas_copied_do_not_hide_serialization() -> None:
    # Twice the code, as after unrolling by two: eight products against one commit written, that is two copied.
    once = read("rs_gemm_touched.sass")
    body = once[once.index("/*0000*/") :]
    census = take_census(read("rs_gemm_touched.ptx"), once + body, {"rs_gemm_touched": Resources(66, 0, 1024, 0)})
    assert census.sass.gmma == 8
    assert census.serialized_wgmma


# ptxas's remarks


def test_ptxas_log_on_plain_lines() -> None:
    log = parse_ptxas_log(SERIALIZED_LOG)
    assert [note.code for note in log.notes] == ["C7519", "C7513"]
    assert [note.kernel for note in log.notes] == ["rs_gemm_touched"] * 2
    assert [note.serializes for note in log.notes] == [False, True]
    assert log.notes[0].text == (
        "warpgroup.arrive is injected in around line 227 by compiler to allow use of registers in GMMA"
    )
    assert log.spills == {"rs_gemm_touched": (0, 0)}


def test_ptxas_log_wrapped_and_indented() -> None:
    log = parse_ptxas_log(SPILL_LOG)
    (note,) = log.notes
    assert (note.code, note.kernel, note.injects_wait) == ("C7517", "spiller", True)
    assert note.text.endswith("by compiler to allow use of registers defined by GMMA")
    assert log.spills == {"scale": (0, 0), "spiller": (900, 904)}


def test_ptxas_log_first_note_behind_the_remark_header() -> None:
    ignored = "Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry."
    log = parse_ptxas_log(
        f"remark[ptxas info]: ptxas output: ptxas info    : (C7508) {ignored}\nptxas info    : 0 bytes\n"
    )
    (note,) = log.notes
    assert (note.code, note.text, note.kernel) == ("C7508", ignored, None)
    assert note.performance_loss and not note.serializes


def test_ptxas_warning_without_a_code_is_kept() -> None:
    (note,) = parse_ptxas_log("ptxas warning : Value of threads per SM is out of range\n").notes
    assert (note.code, note.text) == ("", "Value of threads per SM is out of range")


def test_log_without_ptxas_lines_is_empty() -> None:
    log = parse_ptxas_log("UserWarning: something else\n  about ptxas in general\n")
    assert (log.notes, log.spills) == ((), {})


# Host code


def test_dynamic_shared_memory_of_a_launch() -> None:
    assert dynamic_smem_by_kernel(HOST_MODULE) == {"tma_gemm": 41984}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%16 = llvm.mlir.constant(41984 : i64) : i64", "%16 = llvm.add %arg1, %arg2 : i64"),  # not a constant
        ("llvm.store %14, %86 : i32, !llvm.ptr", "llvm.store %21, %85 : i64, !llvm.ptr"),  # two candidates
        ("llvm.store %79, %92 : !llvm.ptr, !llvm.ptr", ""),  # where from?
        ("@kernels_tma_gemm", "@something_else"),
    ],
)
def test_dynamic_shared_memory_that_cannot_be_followed_is_left_out(old: str, new: str) -> None:
    assert old in HOST_MODULE
    assert dynamic_smem_by_kernel(HOST_MODULE.replace(old, new)) == {}


def test_shared_memory_adds_static_and_dynamic_without_the_reserve() -> None:
    # 5120 bytes in the cubin are the system's 1024 and a static array of 4096.
    resources = Resources(registers=232, stack=0, shared=5120, local=0)
    assert census_of("tma_gemm", resources, host=HOST_MODULE).smem == 41984 + 4096
    assert census_of("tma_gemm", resources).smem is None
    no_smem = replace(resources, shared=0)
    assert census_of("tma_gemm", no_smem, host=HOST_MODULE).smem == 41984


# Comparison

PREDICTION = Expectation(
    kernels=1,
    wgmma={(64, 64, 16, "smem"): 8},
    wgmma_commits=2,
    wgmma_waits=2,
    tma_loads=2,
    tma_stores=1,
    cp_async=0,
    mbarrier_inits=4,
    mbarrier_expect_tx=1,
    ldmatrix=0,
    stmatrix=4,
    setmaxnreg={"dec 40": 1, "inc 232": 1},
    smem_bytes=41984,
    max_registers=232,
    sass=SassExpectation(
        waits=2,
        min_maxima=0,
        max_comparisons=0,
        global_stores={"STG.64": 16, "UTMASTG": 1},
        shared_stores={"STSM.4": 4, "STS.32": 0},
    ),
)


def test_a_kernel_as_predicted_has_no_mismatch(tma: Census) -> None:
    assert compare(tma, PREDICTION) == []
    assert compare(tma, replace(PREDICTION, wgmma={(64, 64, 16, "smem"): None})) == []
    assert all(row.ok for row in rows(tma, PREDICTION))


@pytest.mark.parametrize(
    ("change", "mismatch"),
    [
        ({"kernels": 3}, Mismatch("kernels", "3", "1")),
        ({"wgmma": {(64, 64, 16, "smem"): 7}}, Mismatch("wgmma m64n64k16, A from smem", "7", "8")),
        ({"wgmma": {}}, Mismatch("wgmma m64n64k16, A from smem", "0", "8")),
        ({"wgmma_commits": 1}, Mismatch("wgmma commit_group", "1", "2")),
        ({"wgmma_waits": 8}, Mismatch("wgmma wait_group", "8", "2")),
        ({"tma_loads": 4}, Mismatch("TMA loads", "4", "2")),
        ({"tma_stores": 0}, Mismatch("TMA stores", "0", "1")),
        ({"cp_async": 12}, Mismatch("cp.async copies", "12", "0")),
        ({"mbarrier_inits": 6}, Mismatch("mbarrier init", "6", "4")),
        ({"mbarrier_expect_tx": 2}, Mismatch("mbarrier expect_tx", "2", "1")),
        ({"mma": 1}, Mismatch("mma.sync", "1", "0")),
        ({"ldmatrix": 1}, Mismatch("ldmatrix", "1", "0")),
        ({"stmatrix": 0}, Mismatch("stmatrix", "0", "4")),
        ({"setmaxnreg": {"dec 24": 1}}, Mismatch("setmaxnreg", "dec 24 x 1", "dec 40 x 1, inc 232 x 1")),
        ({"smem_bytes": 42000}, Mismatch("shared memory per CTA (bytes)", "42000", "41984")),
        ({"max_registers": 168}, Mismatch("registers per thread", "at most 168", "232")),
        ({"stack_bytes": 8}, Mismatch("stack (bytes)", "8", "0")),
        ({"spills": 4}, Mismatch("local memory accesses (LDL, STL)", "4", "0")),
        ({"serialized_wgmma": True}, Mismatch("WGMMA serialised by ptxas", "yes", "no")),
        ({"injected_waits": 1}, Mismatch("WGMMA waits added by ptxas", "1", "0")),
        ({"performance_notes": 1}, Mismatch("performance notes of ptxas", "1", "0")),
    ],
)
def test_each_fact_can_mismatch(tma: Census, change: dict[str, object], mismatch: Mismatch) -> None:
    assert compare(tma, replace(PREDICTION, **change)) == [mismatch]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "mismatch"),
    [
        ({"waits": 8}, Mismatch("SASS: warpgroup waits (WARPGROUP.DEPBAR)", "8", "2")),
        ({"min_maxima": 36}, Mismatch("SASS: maxima (FMNMX)", "at least 36", "0")),
        ({"global_stores": {}}, Mismatch("SASS: stores to global memory", "none", "STG.64 x 16, UTMASTG x 1")),
        ({"shared_stores": {"STS.32": 1}}, Mismatch("SASS: stores to shared memory", "STS.32 x 1", "STSM.4 x 4")),
    ],
)
def test_each_fact_of_the_sass_can_mismatch(tma: Census, change: dict[str, Any], mismatch: Mismatch) -> None:
    assert compare(tma, replace(PREDICTION, sass=replace(PREDICTION.sass, **change))) == [mismatch]


# 16 columns: 15 maxima, one FMNMX each or two FSETP and two FSEL; 32 bytes a row, in two stores or in eight.
ROW_MAX = SassExpectation(min_maxima=15, max_comparisons=4, global_stores={"STG.128": 2}, shared_stores={})


def test_maxima_that_propagate_nan_and_narrow_stores_are_caught() -> None:
    careful = census_of("row_max", Resources(28, 0, 0, 0))
    assert (careful.sass.fmnmx, careful.sass.fsetp, careful.sass.fsel) == (15, 0, 0)
    assert compare(careful, Expectation(sass=ROW_MAX)) == []
    careless = census_of("row_max_careless", Resources(24, 0, 0, 0))
    assert compare(careless, Expectation(sass=ROW_MAX)) == [
        Mismatch("SASS: maxima (FMNMX)", "at least 15", "0"),
        Mismatch("SASS: comparisons of numbers (FSETP)", "at most 4", "30"),
        Mismatch("SASS: stores to global memory", "STG.128 x 2", "STG.32 x 8"),
    ]


def test_waits_that_ptxas_adds_are_caught(serialized: Census) -> None:
    """Four products of one group, each with a wait of its own; the source waits twice."""
    expectation = Expectation(serialized_wgmma=None, sass=SassExpectation(waits=2))
    assert compare(serialized, expectation) == [Mismatch("SASS: warpgroup waits (WARPGROUP.DEPBAR)", "2", "4")]


def test_a_kind_of_product_that_is_missing(tma: Census) -> None:
    wanted = {(64, 64, 16, "smem"): 8, (64, 128, 16, "registers"): None}
    assert compare(tma, replace(PREDICTION, wgmma=wanted)) == [
        Mismatch("wgmma m64n128k16, A from registers", "at least 1", "0")
    ]


def test_without_prediction_only_the_standing_demands_are_checked(clean: Census, serialized: Census) -> None:
    assert compare(clean, Expectation()) == []
    (mismatch,) = compare(serialized, Expectation())
    assert str(mismatch).startswith("WGMMA serialised by ptxas: expected no, found yes: ptxas C7513: Potential")


def test_ptxas_notes_are_mismatches_in_its_own_words() -> None:
    log = (
        "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; no register count.\n"
        "ptxas info    : (C7517) warpgroup.wait is injected in around line 142 by compiler in function 'tma_gemm'\n"
        "ptxas info    : (C7517) warpgroup.wait is injected in around line 9 by compiler in function 'another'\n"
    )
    census = census_of("tma_gemm", Resources(232, 0, 1024, 0), log=log)
    assert [str(mismatch) for mismatch in compare(census, Expectation())] == [
        "WGMMA waits added by ptxas: expected 0, found 1 "
        "(C7517 warpgroup.wait is injected in around line 142 by compiler)",
        "performance notes of ptxas: expected 0, found 1 "
        "(C7508 Potential Performance Loss: 'setmaxnreg' ignored; no register count.)",
    ]


def test_shared_memory_beyond_the_hardware_is_a_mismatch_even_unpredicted() -> None:
    host = HOST_MODULE.replace("41984", "232449")
    census = census_of("tma_gemm", Resources(232, 0, 1024, 0), host=host)
    fact = "shared memory per CTA (bytes)"
    assert compare(census, Expectation()) == [Mismatch(fact, "at most 232448", "232449")]
    fits = census_of("tma_gemm", Resources(232, 0, 1024, 0), host=HOST_MODULE.replace("41984", "232448"))
    assert compare(fits, Expectation()) == []


def test_unknown_shared_memory_is_no_match(clean: Census) -> None:
    assert compare(clean, Expectation(smem_bytes=8192)) == [
        Mismatch("shared memory per CTA (bytes)", "8192", "unknown")
    ]


def test_facts_add_up_over_kernels(clean: Census, tma: Census) -> None:
    both = Census(kernels=(*clean.kernels, *tma.kernels))
    assert both.ptx.instructions == 204 + 368
    assert both.ptx.wgmma == {REGISTER_A: 4, SMEM_A: 8}
    assert both.ptx.tma_loads == {2: 2}
    assert both.sass.gmma == 12
    assert len(both.sass.loops) == len(clean.sass.loops) + len(tma.sass.loops)
    assert both.registers == 232
    assert both.smem is None  # that of the first launch is not known


def test_different_modules_are_refused() -> None:
    with pytest.raises(ValueError, match="not the same module"):
        take_census(read("rs_gemm.ptx"), read("tma_gemm.sass"), {"rs_gemm": Resources(1, 0, 0, 0)})


def test_json_holds_everything(tma: Census) -> None:
    document = json.loads(json.dumps(tma.as_dict()))
    (kernel,) = document["kernels"]
    assert kernel["ptx"]["wgmma"] == [
        {
            "m": 64,
            "n": 64,
            "k": 16,
            "a_source": "smem",
            "d_type": "f32",
            "a_type": "bf16",
            "b_type": "bf16",
            "count": 8,
        }
    ]
    assert kernel["ptx"]["tma_loads"] == {"2": 2}
    assert kernel["smem"] == document["total"]["smem"] == 41984
    assert kernel["sass"]["loops"][2]["waits"] is True
    assert document["total"]["serialized_wgmma"] is False


def test_importing_the_census_is_cheap() -> None:
    code = (
        "import sys, fa3gen.compile.census; "
        "print(sorted({'torch', 'cutlass', 'pydantic', 'rich'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
