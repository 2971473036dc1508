"""The parser: what the CuTe DSL's PTX contains, read as the PTX ISA's "Syntax" says, and errors with their line."""

from __future__ import annotations

import pytest
from machine import Machine

from fa3gen.cpu.findings import OutsideModel
from fa3gen.cpu.ptx import (
    Address,
    FloatBits,
    Immediate,
    Instruction,
    Kernel,
    Negated,
    Pair,
    Parameter,
    PtxError,
    Register,
    SharedVariable,
    Symbol,
    Vector,
    parse,
    registers_in,
)

DECLARATIONS = ".reg .b32 %r<10>; .reg .b64 %rd<10>; .reg .pred %p<4>; .reg .f32 %f<4>;"


def kernel(body: str) -> Kernel:
    """A kernel whose body begins on line 3."""
    return parse(f".entry k()\n{{\n{body}\n}}\n")["k"]


def instruction(text: str) -> Instruction:
    """One instruction, on line 4."""
    (found,) = kernel(f"{DECLARATIONS}\n{text}").instructions
    return found


# ---------------------------------------------------------------------- modules and entries


def test_module() -> None:
    text = """
.version 8.8
.target sm_90a  // the only one
.address_size 64
.file 1 "generated/a.py"
.extern .shared .align 1024 .b8 dynamic[];
.visible .shared .align 16 .b8 table[48];
.shared .align 4 .b8 $plain$[8];
/* two
   kernels */
.visible .entry first(
    .param .align 64 .b8 first_param_0[128],
    .param .u64 first_param_1,
    .param .f32 first_param_2,
    .param .align 1 .b8 first_param_3[1]
)
.reqntid 256, 1, 1
{
    ret;
}
.visible .entry second()
{
    trap;
}
"""
    kernels = parse(text)
    assert list(kernels) == ["first", "second"]
    assert kernels["first"].parameters == (
        Parameter("first_param_0", 128, 64),
        Parameter("first_param_1", 8, 8),
        Parameter("first_param_2", 4, 4),
        Parameter("first_param_3", 1, 1),
    )
    assert kernels["first"].shared == (
        SharedVariable("dynamic", 0, 1024, dynamic=True),
        SharedVariable("table", 48, 16, dynamic=False),
        SharedVariable("$plain$", 8, 4, dynamic=False),
    )
    assert [(found.mnemonic, found.line) for found in kernels["first"].instructions] == [("ret", 19)]
    assert [(found.mnemonic, found.line) for found in kernels["second"].instructions] == [("trap", 23)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (".version 8.8\n", "holds no .entry"),
        (".entry k()\n{\nret;\n", "no closing brace"),
    ],
)
def test_modules_that_are_not_understood(text: str, words: str) -> None:
    with pytest.raises(PtxError, match=words):
        parse(text)


# ---------------------------------------------------------------------- operands


@pytest.mark.parametrize(
    ("text", "operand"),
    [
        ("7", Immediate(7)),
        ("-7", Immediate(-7)),
        ("0x1F", Immediate(31)),
        ("0XffffffffU", Immediate(0xFFFFFFFF)),
        ("-0x10", Immediate(-16)),
        ("017", Immediate(15)),
        ("0", Immediate(0)),
        ("42U", Immediate(42)),
        ("0f3F800000", FloatBits(0x3F800000, 32)),
        ("0Fff800000", FloatBits(0xFF800000, 32)),
        ("0d3FF0000000000000", FloatBits(0x3FF0000000000000, 64)),
        ("0D0000000000000001", FloatBits(1, 64)),
        ("%r3", Register("%r3")),
        ("!%p1", Negated(Register("%p1"))),
        ("%tid.x", Symbol("%tid.x")),
        ("%laneid", Symbol("%laneid")),
        ("%clock64", Symbol("%clock64")),
        ("some$symbol", Symbol("some$symbol")),
        ("_", Symbol("_")),
        ("{%r1, %r2}", Vector((Register("%r1"), Register("%r2")))),
        ("{%r1,_}", Vector((Register("%r1"), Symbol("_")))),
        ("%r1|%p2", Pair(Register("%r1"), Register("%p2"))),
        ("_|%p2", Pair(Symbol("_"), Register("%p2"))),
        ("[%rd1]", Address(Register("%rd1"), 0)),
        ("[%rd1+16]", Address(Register("%rd1"), 16)),
        ("[%rd1-16]", Address(Register("%rd1"), -16)),
        ("[%rd1+-16]", Address(Register("%rd1"), -16)),
        ("[%rd1 + 0x10]", Address(Register("%rd1"), 16)),
        ("[table+4]", Address(Symbol("table"), 4)),
        ("[16]", Address(Immediate(16), 0)),
        ("[%rd1, {%r1, -3}]", Address(Register("%rd1"), 0, (Register("%r1"), Immediate(-3)))),
    ],
)
def test_operands(text: str, operand: object) -> None:
    assert instruction(f"mov.b32 %r0, {text};").operands == (Register("%r0"), operand)
    assert instruction(f"mov.b32\t%r0,{text} ;").operands[1] == operand


def test_registers_in_operands() -> None:
    found = instruction("op [%rd1, {%r1, %r2}], {%r3, 4}, %r4|%p1, !%p2, 7, name;")
    names = [name for operand in found.operands for name in registers_in(operand)]
    assert names == ["%rd1", "%r1", "%r2", "%r3", "%r4", "%p1", "%p2"]


@pytest.mark.parametrize(
    "text",
    [
        "mov.b32 %r0, 1.5;",
        "mov.b32 %r0, %r1 %r2;",
        "mov.b32 %r0, [%r1;",
        "mov.b32 %r0,;",
        "mov.b32 %r0, {%r1 %r2};",
        "mov.b32 %r0, {};",
        "mov.b32 %r0, -%r1;",
        "mov.b32 %r0, [%rd1+%r2];",
        "mov.b32 %r0, {%r1,};",
        "MOV %r0;",
    ]
    + ["mov.b32 %r0, [%rd1, %r1];", "mov.b32 %r0, [%rd1*2];", "mov.b32 %r0, #3;", "@%p1;", "mov.b32 %r0, 08;"],
)
def test_operands_that_are_not_understood(text: str) -> None:
    """Refused with the line; nothing is left out silently."""
    with pytest.raises(PtxError, match="PTX line 4:"):
        instruction(text)


def test_predicates() -> None:
    plain = instruction("mov.b32 %r0, 1;")
    held, negated = instruction("@%p1 mov.b32 %r0, 1;"), instruction("@!%p3\tbra.uni somewhere;")
    assert (plain.predicate, plain.negated) == (None, False)
    assert (held.predicate, held.negated, held.mnemonic) == ("%p1", False, "mov.b32")
    assert (negated.predicate, negated.negated, negated.mnemonic, negated.opcode) == ("%p3", True, "bra.uni", "bra")


# ---------------------------------------------------------------------- registers, labels, scopes


def test_registers_of_families_exist_when_used() -> None:
    found = kernel(".reg .b32 %r<100>;\n.reg .pred %p<2>, q; .reg .f32 x, y;\nmov.b32 %r7, %r99;\nmov.f32 x, y;\nret;")
    assert found.registers == {"%r7": "b32", "%r99": "b32", "x": "f32", "y": "f32", "q": "pred"}
    assert sorted(found.numbers.values()) == list(range(5))


def test_labels_stand_before_instructions() -> None:
    found = kernel(f"{DECLARATIONS}\n$L__BB0_1:\nmov.b32 %r0, 1;\nend: other: ret;\nlast:")
    assert found.labels == {"$L__BB0_1": 0, "end": 1, "other": 1, "last": 2}


def test_lines_of_long_instructions() -> None:
    """An instruction over several lines is on the line where it begins, the next one where it begins itself."""
    found = kernel(f"{DECLARATIONS}\nop {{%r1,\n  %r2,\n  %r3}},\n  %r4;\nmov.b32 %r0, 1; ret;\n\n/* a\n b */ ret;")
    assert [(each.mnemonic, each.line) for each in found.instructions] == [
        ("op", 4),
        ("mov.b32", 8),
        ("ret", 8),
        ("ret", 11),
    ]


def test_scopes() -> None:
    """Names of inner scopes are their own; a name of an outer scope is seen inside; labels may come later."""
    found = kernel(
        f"{DECLARATIONS}\n.reg .b32 x;\nmov.b32 x, 1;\n"
        "{ .reg .b32 x; .reg .pred p; mov.b32 x, %r1;\n"
        "@p bra done;\n{\n.reg .b32 x; mov.b32 x, 2; }\nmov.b32 %r2, x;\ndone: }\n"
        "{ .reg .b64 x; mov.b64 x, 3; done: bra done; }\nmov.b32 %r3, x;"
    )
    operands = [each.operands for each in found.instructions]
    outer, first, inner, second = (operands[number][0].name for number in (0, 1, 3, 5))  # type: ignore[union-attr]
    assert len({outer, first, inner, second}) == 4
    assert operands[4][1] == Register(first) and operands[7][1] == Register(outer)
    assert [found.registers[name] for name in (outer, first, inner, second)] == ["b32", "b32", "b32", "b64"]
    assert found.instructions[2].predicate not in ("p", None)
    targets = [operands[2][0].name, operands[6][0].name]  # type: ignore[union-attr]
    assert [found.labels[target] for target in targets] == [5, 6] and targets[0] != targets[1]


def test_local_variables() -> None:
    found = kernel(f"{DECLARATIONS}\n.local .align 4 .b8 a[6];\n.local .align 16 .b8 depot[32];\nmov.b64 %rd1, depot;")
    assert found.local == {"a": 0, "depot": 16} and found.local_bytes == 48
    assert found.instructions[0].operands[1] == Symbol("depot")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (".local .b8 x[4];", "declaration not understood"),
        (".reg b32 x;", "declaration not understood"),
        (".branch x;", "directive not understood: .branch"),
        (".callprototype x;", "directive not understood"),
        (".shared .align 4 .b8 inner[4];", "directive not understood"),
    ],
)
def test_directives_that_are_not_understood(text: str, words: str) -> None:
    with pytest.raises(PtxError, match=f"PTX line 4: {words}"):
        kernel(f"{DECLARATIONS}\n{text}\nret;")


def test_directives_without_effect() -> None:
    assert len(kernel(f'{DECLARATIONS}\n.pragma "nounroll";\nret;').instructions) == 1


# ---------------------------------------------------------------------- line information

LOCATIONS = """.file 1 "generated/a.py"
.file 2 "generated/b.py"
.entry k()
{
.loc 1 10 4
mov.b32 %r0, 1;
.loc 2 20 8, function_name info, inlined_at 1 5 3
mov.b32 %r0, 2;
{
.loc 1 3 1
mov.b32 %r0, 3;
}
.loc 1 99 0
mov.b32 %r0, 4;
.loc 7 12 1
ret;
}
"""


def test_locations() -> None:
    """Lines of inline assembly and lines of column 0 belong to the instruction before."""
    found = parse(LOCATIONS.replace("{\n.loc 1 10", "{\n.reg .b32 %r<2>;\n.loc 1 10", 1))["k"].instructions
    assert [each.source for each in found] == [
        ("generated/a.py", 10),
        ("generated/b.py", 20),
        ("generated/b.py", 20),
        ("generated/b.py", 20),
        ("?", 12),
    ]


def test_first_location_may_have_column_0() -> None:
    assert parse('.file 1 "x.py"\n.entry k()\n{\n.loc 1 5 0\nret;\n}')["k"].instructions[0].source == ("x.py", 5)
    assert kernel("ret;").instructions[0].source is None


# ---------------------------------------------------------------------- instructions outside the model


OUTSIDE = """
mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f2};
ld.global.acquire.gpu.b32 %r1, [%rd1];
ld.b32 %r1, [%rd1];
st.global.release.gpu.b32 [%rd1], %r1;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 16, [%r2];
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%rd1], %r2;
cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd1, {%r1, %r2}], [%r3];
mbarrier.arrive.shared::cluster.b64 _, [%r1];
mbarrier.try_wait.shared.b64 %p1, [%r1], %rd1;
bar.red.popc.u32 %r1, 0, %p1;
barrier.cluster.arrive;
atom.global.add.f64 %rd1, [%rd2], %rd3;
setmaxnreg.dec.sync.u32 24;
wgmma.fence.sync;
fence.proxy.alias;
stmatrix.sync.aligned.m8n8.x4.trans.shared.b8 [%r1], {%r1};
discard.L2 [%rd1], 128;
call f;
""".strip().splitlines()


@pytest.mark.parametrize("text", OUTSIDE)
def test_instructions_outside_the_model(text: str) -> None:
    """The report names the mnemonic with its modifiers, the line, the kernel, and what to do."""
    machine = Machine(f"mov.b32 %r1, 0;\n{text}\n")
    mnemonic = text.rstrip(";").split()[0]
    with pytest.raises(OutsideModel) as refusal:
        machine.run()
    message = str(refusal.value)
    assert message.startswith(
        f"PTX line {machine.line(text)} of kernel: {mnemonic} is not an instruction of the CPU model"
    )
    assert "add a form to fa3gen/cpu/isa" in message and "on a GPU" in message
