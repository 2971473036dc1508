"""Canary: each assumption about the DSL's private interfaces, checked on its own; a failure says what changed."""

from __future__ import annotations

import ctypes
import importlib
import re

import pytest
from hosting import compiled
from rendering import CHECKOUT

from fa3gen.base.errors import UserError
from fa3gen.compile import toolchain
from fa3gen.compile.cache import cached_compile
from fa3gen.cpu import dsl
from fa3gen.cpu.driver import ENTRY_POINTS, PROVIDED_SYMBOLS

STEM = "k4_2_d64"
C_TYPES = {ctypes.c_void_p: "!llvm.ptr", ctypes.c_int32: "i32", ctypes.c_int64: "i64"}
# Structures that fa3gen.cpu.driver and fa3gen.cpu.host lay out, as the host code declares them.
STRUCTURES = {
    "cudaLaunchConfig_t": "struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>",
    "cudaLaunchAttribute": "struct<(i32, array<4 x i8>, array<64 x i8>)>",
    "TVMFFIAny": 'struct<"TVMFFIAny.1", (i32, i32, i64)>',
    "DLTensor": (
        'struct<"DLTensor.1", (ptr, struct<"DLDevice.1", (i32, i32)>, i32, '
        'struct<"DLDataType.1", (i8, i8, i16)>, ptr, ptr, i64)>'
    ),
}
# A module of our own: main(x) = twice(x) + 1 in i32, `twice` provided by the test.
ADDER = """module {
  llvm.func @twice(i32) -> i32
  llvm.func @main(%arg0: i32) -> i32 {
    %0 = llvm.call @twice(%arg0) : (i32) -> i32
    %1 = llvm.mlir.constant(1 : i32) : i32
    %2 = llvm.add %0, %1 : i32
    llvm.return %2 : i32
  }
}
"""


@pytest.fixture(scope="module")
def host_module() -> str:
    return compiled(STEM).host_module


def declaration(host_module: str, name: str) -> str:
    """`(arguments) -> result` of a declared function."""
    found = re.search(rf"^  llvm\.func @{name}(\(.*)$", host_module, re.MULTILINE)
    assert found, f"the DSL's host code no longer declares {name}"
    return found[1].partition(" attributes")[0]


def test_installed_dsl_is_a_supported_one() -> None:
    dsl.require_supported_dsl()


def test_ptx_attribute() -> None:
    ptx = compiled(STEM).ptx
    assert ".target sm_90a" in ptx and ".visible .entry" in ptx, "compiled.__ptx__ no longer holds the kernel's PTX"


@pytest.fixture(scope="module")
def with_lines() -> str:
    """The PTX with line information."""
    return cached_compile(CHECKOUT.module_path(STEM), line_info=True).ptx


def test_line_info_option(with_lines: str) -> None:
    assert re.search(
        rf'^\s*\.file\s+\d+ ".*{STEM}\.py"', with_lines, re.MULTILINE
    ), "with --generate-line-info the PTX no longer names the module's file"
    assert "\t.loc\t" in with_lines, "with --generate-line-info the PTX no longer has .loc directives"


def test_line_info_changes_nothing_else(with_lines: str) -> None:
    assert without_line_info(with_lines) == without_line_info(
        compiled(STEM).ptx
    ), "with --generate-line-info the DSL now produces other instructions"


def without_line_info(ptx: str) -> list[str]:
    """The statements of a PTX text: no comments, line numbers, labels for them, blank lines or debug sections."""
    code = ptx.partition(".section\t.debug")[0]
    lines = [line.partition("//")[0].strip() for line in code.splitlines()]
    lines = [re.sub(r"^\.target sm_90a, debug$", ".target sm_90a", line) for line in lines]
    return [line for line in lines if line and not re.match(r"\.loc|\.file|\$L__tmp\d+:", line)]


def test_host_module_attribute(host_module: str) -> None:
    assert host_module, "cute.compile's result no longer has the attribute ir_module"
    assert "llvm.func @" in host_module, "compiled.ir_module is no longer in the LLVM dialect"


def test_host_module_can_be_parsed_again(host_module: str) -> None:
    ir = importlib.import_module("cutlass._mlir.ir")
    with ir.Context(), ir.Location.unknown():
        assert ir.Module.parse(host_module).operation.verify(), "the text of compiled.ir_module is no valid module"


def test_execution_engine_calls_registered_functions() -> None:
    engine = dsl.HostEngine(ADDER)
    engine.register("twice", ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)(lambda value: 2 * value))
    value, result = ctypes.c_int32(20), ctypes.c_int32()
    engine.lookup("main")(ctypes.addressof(value), ctypes.addressof(result))
    assert result.value == 41, "ExecutionEngine no longer passes arguments in MLIR's packed form"


def test_registering_after_the_first_lookup_is_refused() -> None:
    engine = dsl.HostEngine(ADDER)
    twice = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)(lambda value: 2 * value)
    engine.register("twice", twice)
    engine.lookup("main")
    with pytest.raises(RuntimeError, match="twice registered after the first lookup"):
        engine.register("twice", twice)


def test_lookup_of_what_is_not_there() -> None:
    engine = dsl.HostEngine(ADDER)
    engine.register("twice", ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)(lambda value: 2 * value))
    with pytest.raises(KeyError, match="no_such_function"):
        engine.lookup("no_such_function")


def test_text_that_is_no_module() -> None:
    with pytest.raises(UserError, match="cannot be read by the installed DSL"):
        dsl.HostEngine("module { llvm.func }")


def test_external_symbols_are_those_provided(host_module: str) -> None:
    declared = dsl.declared_symbols(host_module) - dsl.C_LIBRARY_SYMBOLS
    assert (
        declared - PROVIDED_SYMBOLS == set()
    ), "the DSL's host code calls functions that the executor does not provide"
    assert PROVIDED_SYMBOLS - declared == set(), "the DSL's host code no longer calls functions that are provided"


@pytest.mark.parametrize("name", sorted(ENTRY_POINTS))
def test_signature_of_external_symbol(host_module: str, name: str) -> None:
    entry = ENTRY_POINTS[name]
    arguments = ", ".join(C_TYPES[kind] for kind in entry.arguments)
    expected = f"({arguments})" + (f" -> {C_TYPES[entry.result]}" if entry.result else "")
    assert declaration(host_module, name) == expected, f"the DSL's host code now calls {name} with another signature"


def test_destructor_takes_one_pointer(host_module: str) -> None:
    assert declaration(host_module, "cuda_dialect_unload_library_once") == "(!llvm.ptr)"


def test_entry_point(host_module: str) -> None:
    entries = dsl.exported_functions(host_module)
    assert len(entries) == 1, "the host code no longer has exactly one function __tvm_ffi_<name>"
    signature = re.search(rf"llvm\.func @{entries[0]}\((.*)\) -> i32 ", host_module)
    assert signature and re.findall(r"%arg\d: ([!.\w]+)", signature[1]) == [
        "!llvm.ptr",
        "!llvm.ptr",
        "i32",
        "!llvm.ptr",
    ]


def test_library_is_loaded_through_two_functions(host_module: str) -> None:
    for name, arguments in {
        "cuda_init": "%arg0: !llvm.ptr",
        "cuda_load_to_device": "%arg0: !llvm.ptr, %arg1: i32",
    }.items():
        assert f"llvm.func @{name}({arguments}) -> i32 {{" in host_module, f"{name} has another signature"
        assert f"llvm.mlir.addressof @{name} : !llvm.ptr" in host_module, f"{name} is no longer passed on"


@pytest.mark.parametrize("name", STRUCTURES)
def test_structure(host_module: str, name: str) -> None:
    assert STRUCTURES[name] in host_module, f"the DSL's host code no longer lays {name} out as the executor does"


@pytest.mark.parametrize(
    ("version", "said"), [("4.9.0", "4.9.0 is installed; the CPU executor supports 4.8.x"), (None, "needs")]
)
def test_unsupported_dsl_is_refused(monkeypatch: pytest.MonkeyPatch, version: str | None, said: str) -> None:
    monkeypatch.setattr(toolchain, "installed_version", lambda package: version)
    with pytest.raises(UserError, match=f"{said}.*pip install 'nvidia-cutlass-dsl>=4.8,<4.9'"):
        dsl.HostEngine(ADDER)
