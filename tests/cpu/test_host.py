"""Host code on CPU tensors: what is launched with which parameters, and everything that is refused."""

from __future__ import annotations

import ctypes
import math
import re
import struct
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hosting import RecordedProgram, compiled, program
from rendering import ROOT

from fa3gen.base.errors import UserError
from fa3gen.cpu import driver
from fa3gen.cpu.driver import LaunchRefused, check_launch
from fa3gen.cpu.host import HostProgram, Launch

STEM = "k4_2_d128"
SCALE = 0.25


def tensors(
    batch: int = 2, seq_q: int = 100, seq_k: int = 90, heads_q: int = 4, heads_kv: int = 2, dim: int = 128
) -> tuple[torch.Tensor, ...]:
    """q, k, v, o and LSE of `STEM`."""
    q, o = (torch.zeros(batch, seq_q, heads_q, dim, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.zeros(batch, seq_k, heads_kv, dim, dtype=torch.bfloat16) for _ in range(2))
    return q, k, v, o, torch.zeros(batch, heads_q, seq_q)


def a_launch(**changes: object) -> Launch:
    """A launch that every check passes, with some fields changed."""
    fields = {
        "kernel": "kernel",
        "grid": (8, 1, 1),
        "block": (256, 1, 1),
        "cluster": (1, 1, 1),
        "dynamic_shared_bytes": 99328,
        "stream": 0,
        "arguments": 0,
    }
    return Launch(**{**fields, **changes})  # type: ignore[arg-type]


# Launches


def test_launch_and_parameters() -> None:
    q, k, v, o, lse = tensors(batch=3, seq_q=300, seq_k=77)
    launch, parameters = program(STEM).launch(q, k, v, o, lse, SCALE)
    (kernel,) = re.findall(r"\.entry (\w+)\(", compiled(STEM).ptx)
    assert launch.kernel == kernel
    assert (launch.grid, launch.block, launch.cluster) == ((3 * 3 * 4, 1, 1), (256, 1, 1), (1, 1, 1))
    assert (launch.dynamic_shared_bytes, launch.stream) == (99328, 0)
    # (seq, heads, batch) of q and k; LSE as a pointer, (seq, heads, batch) and the strides of heads and batch.
    assert struct.unpack("<3i", parameters[0]) == (300, 4, 3)
    assert struct.unpack("<3i", parameters[1]) == (77, 2, 3)
    assert struct.unpack("<Q3i4xqq", parameters[4]) == (lse.data_ptr(), 300, 4, 3, 300, 1200)
    assert struct.unpack("<f", parameters[-1]) == pytest.approx((SCALE * math.log2(math.e),), rel=1e-7)


def test_kernel_without_tma_gets_addresses() -> None:
    q, k, v, o, lse = tensors()
    launch, parameters = program("k2_d128").launch(q, k, v, o, lse, SCALE)
    assert launch.block == (128, 1, 1)
    addresses = [struct.unpack_from("<Q", parameter)[0] for parameter in parameters[:5]]
    assert addresses == [tensor.data_ptr() for tensor in (q, k, v, o, lse)]


def test_integers_are_taken_for_floats() -> None:
    *_, scale = program(STEM).launch(*tensors(), 2)[1]
    assert struct.unpack("<f", scale) == pytest.approx((2 * math.log2(math.e),), rel=1e-7)


def test_strides_of_single_dimensions_come_as_they_are() -> None:
    """They are below any alignment, and mean nothing: neither the host code nor the kernel may use them."""
    q, k, v, o, lse = tensors(batch=1, heads_q=1, heads_kv=1)
    odd = [tensor.as_strided(tensor.shape, (3, 128, 5, 1)) for tensor in (q, k, v, o)]
    _, parameters = program("k2_d128").launch(*odd, lse, SCALE)
    for tensor, parameter in zip(odd, parameters, strict=False):
        assert struct.unpack("<Q3i4x3q", parameter) == (tensor.data_ptr(), tensor.shape[1], 1, 1, 128, 5, 3)


def test_calls_repeat_quickly() -> None:
    arguments = tensors()
    times = []
    for _ in range(30):
        started = time.perf_counter()
        program(STEM).host(*arguments, SCALE)
        times.append(time.perf_counter() - started)
    assert min(times) < 1e-3


def test_threads_take_turns() -> None:
    inside, seen = [], []

    def on_launch(launch: Launch) -> None:
        inside.append(launch)
        time.sleep(0.005)
        seen.append((launch.grid[0], threading.current_thread().name, len(inside)))
        inside.pop()

    host = HostProgram(compiled(STEM).host_module, on_launch)

    def call(seq_q: int) -> None:
        for _ in range(5):
            host(*tensors(batch=1, seq_q=seq_q), SCALE)

    threads = [threading.Thread(target=call, args=(128 * tiles,), name=str(4 * tiles)) for tiles in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 15 and all(str(grid) == name and together == 1 for grid, name, together in seen)


def test_kernels_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[bytes] = []
    get_kernel = driver.CudaRuntime.get_kernel

    def counting(runtime: driver.CudaRuntime, kernel: int, library: int, name: int) -> int:
        names.append(ctypes.string_at(name))
        return get_kernel(runtime, kernel, library, name)

    monkeypatch.setattr(driver.CudaRuntime, "get_kernel", counting)
    host = HostProgram(compiled(STEM).host_module, lambda launch: None)
    assert names == []
    for _ in range(3):
        host(*tensors(), SCALE)
    assert len(names) == 1


# Errors of arguments


def test_host_code_checks_arguments() -> None:
    q, k, v, o, lse = tensors()
    for arguments, kind, message in [
        ((q, k, v, o, lse), TypeError, r"Expects 6 parameters"),
        ((q, k, v, o, 1.0, SCALE), TypeError, r"Mismatched type on argument #4 .* expected Tensor"),
        ((q, k, v, o, lse, q), TypeError, r"argument #5 .* expected float"),
        ((q, k, v[:, :80], o, lse, SCALE), ValueError, r"v\.shape\[1\] on argument #2 .* to match k\.shape\[1\]"),
        ((q, k.half(), v, o, lse, SCALE), ValueError, r"argument #1 .* expected dtype=bfloat16"),
        ((q[..., :64], k, v, o, lse, SCALE), ValueError, r"q\.shape\[3\] .* expected to be 128"),
        ((q, k, v, o, lse[0], SCALE), ValueError, r"argument #4 .* expected ndim=3"),
    ]:
        with pytest.raises(kind, match=message):
            program(STEM).host(*arguments)
    misaligned = torch.zeros(q.numel() + 8, dtype=q.dtype)[1 : q.numel() + 1].view(q.shape)
    with pytest.raises(ValueError, match=r"Misaligned Tensor data on argument #0 .* alignment=16 bytes"):
        program(STEM).host(misaligned, k, v, o, lse, SCALE)
    odd_rows = torch.zeros(2, 100, 4, 132, dtype=q.dtype)[..., :128]
    with pytest.raises(ValueError, match=r"Invalid q\.strides\[\d\] .* divisible by 8"):
        program(STEM).host(odd_rows, k, v, o, lse, SCALE)
    program(STEM).launch(q, k, v, o, lse, SCALE)  # and none of that is left over


def test_tensors_elsewhere_are_refused() -> None:
    q, k, v, o, lse = tensors()
    with pytest.raises(UserError, match=r"argument 1 is on meta; .* pass argument 1\.cpu\(\), or run .* on the GPU"):
        program(STEM).host(q, k.to("meta"), v, o, lse, SCALE)
    with pytest.raises(UserError, match=r"argument 2 is torch\.sparse_coo; .*to_dense"):
        program(STEM).host(q, k, v.to_sparse(), o, lse, SCALE)


def test_values_that_no_kernel_takes_are_refused() -> None:
    q, k, v, o, lse = tensors()
    with pytest.raises(TypeError, match="argument 0 has dtype torch.complex64"):
        program(STEM).host(q.to(torch.complex64), k, v, o, lse, SCALE)
    with pytest.raises(TypeError, match="argument 5 is a str"):
        program(STEM).host(q, k, v, o, lse, "0.25")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="argument #5"):
        program(STEM).host(q, k, v, o, lse, None)


def test_module_compiled_without_tvm_ffi_is_refused() -> None:
    text = compiled(STEM).host_module
    without = re.sub(r"^  llvm\.func @__tvm_ffi_", "  llvm.func internal @__tvm_ffi_", text, flags=re.MULTILINE)
    with pytest.raises(UserError, match=r"0 entry points .* options contain --enable-tvm-ffi"):
        HostProgram(without, lambda launch: None)


# Exceptions


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_on_launch_raises_comes_out(kind: type[BaseException]) -> None:
    calls = 0

    def on_launch(launch: Launch) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise kind("first")

    host = HostProgram(compiled(STEM).host_module, on_launch)
    with pytest.raises(kind, match="first"):
        host(*tensors(), SCALE)
    host(*tensors(), SCALE)
    assert calls == 2


def with_constant(old: str, new: str) -> HostProgram:
    """The host code of `STEM` with one constant changed."""
    text = compiled(STEM).host_module
    assert text.count(f"llvm.mlir.constant({old})") == 1
    changed = text.replace(f"llvm.mlir.constant({old})", f"llvm.mlir.constant({new})")
    return HostProgram(changed, lambda launch: pytest.fail("the launch was not refused"))


def test_more_shared_memory_than_an_sm_has_is_refused() -> None:
    host = with_constant("99328 : i64", "232449 : i64")
    for _ in range(2):
        with pytest.raises(LaunchRefused, match="232449 bytes of shared memory; a CTA has at most 232448"):
            host(*tensors(), SCALE)


def test_empty_grid_is_refused() -> None:
    """As on the GPU; the generated modules' `attention` does not launch in this case."""
    with pytest.raises(LaunchRefused, match=r"grid\.x is 0; it needs to be 1 to 2147483647"):
        program(STEM).host(*tensors(seq_q=0), SCALE)


def test_failed_load_is_reported() -> None:
    text = compiled(STEM).host_module.replace("constant(97 : i32)", "constant(98 : i32)")
    host = HostProgram(text, lambda launch: None)
    with pytest.raises(LaunchRefused, match="outside the model: .* device attribute 98"):
        host(*tensors(), SCALE)


@pytest.mark.parametrize(
    ("changes", "limit", "message"),
    [
        ({"grid": (2**31, 1, 1)}, 232448, "grid.x is 2147483648; it needs to be 1 to 2147483647"),
        ({"grid": (1, 65536, 1)}, 232448, "grid.y is 65536; it needs to be 1 to 65535"),
        ({"grid": (1, 1, 65536)}, 232448, "grid.z is 65536; it needs to be 1 to 65535"),
        ({"block": (0, 1, 1)}, 232448, "block.x is 0; it needs to be 1 to 1024"),
        ({"block": (1, 1, 65)}, 232448, "block.z is 65; it needs to be 1 to 64"),
        ({"block": (512, 2, 2)}, 232448, "a block of 512 x 2 x 2 = 2048 threads; a CTA has at most 1024"),
        ({"dynamic_shared_bytes": 232449}, 232448, "232449 bytes of shared memory; a CTA has at most 232448"),
        ({}, 99327, "99328 bytes of dynamic shared memory; cudaFuncAttributeMaxDynamicSharedMemorySize allows 99327"),
        ({}, None, "99328 bytes of dynamic shared memory; cudaFuncAttributeMaxDynamicSharedMemorySize allows 49152"),
        ({"cluster": (2, 1, 1)}, 232448, "outside the model: clusters (2 x 1 x 1 CTAs)"),
    ],
)
def test_launches_that_a_driver_refuses(changes: dict[str, object], limit: int | None, message: str) -> None:
    with pytest.raises(LaunchRefused) as caught:
        check_launch(a_launch(**changes), limit)
    assert str(caught.value) == f"launch of kernel refused: {message}"


def test_launches_at_the_limits_pass() -> None:
    check_launch(a_launch(grid=(2**31 - 1, 65535, 65535), block=(16, 1, 64), dynamic_shared_bytes=232448), 232448)
    check_launch(a_launch(dynamic_shared_bytes=49152), None)


def run_launch(*attributes: tuple[int, list[int]]) -> list[Launch]:
    """Launch through `CudaRuntime` as the host code does, with launch attributes (id, words of the value)."""
    launches: list[Launch] = []
    runtime = driver.CudaRuntime(launches.append)
    slot, name = ctypes.c_void_p(), ctypes.create_string_buffer(b"kernel")
    runtime.get_kernel(ctypes.addressof(slot), 1, ctypes.addressof(name))
    words = b"".join(struct.pack("<i4x16I", number, *value, *[0] * (16 - len(value))) for number, value in attributes)
    values = ctypes.create_string_buffer(words or b"\0")
    config = struct.pack("<3I3IQQQI4x", 1, 2, 3, 32, 1, 1, 1024, 0, ctypes.addressof(values), len(attributes))
    memory = ctypes.create_string_buffer(config)
    runtime.launch_kernel_ex(ctypes.addressof(memory), slot.value or 0, 0)
    return launches


def test_launch_attributes() -> None:
    (launch,) = run_launch((4, [1, 1, 1]), (2, [0]), (6, [0]))
    assert (launch.kernel, launch.grid, launch.cluster) == ("kernel", (1, 2, 3), (1, 1, 1))
    assert not launch.beside_previous and run_launch((6, [1]))[0].beside_previous
    for attribute, message in [
        ((4, [2, 1, 1]), r"clusters \(2 x 1 x 1 CTAs\)"),
        ((2, [1]), r"cooperative \(launch attribute 2\)"),
        ((8, [0]), "launch attribute 8"),
    ]:
        with pytest.raises(LaunchRefused, match=f"outside the model: {message}"):
            run_launch(attribute)


# Numbers of the public headers


def test_numbers_are_those_of_the_tvm_ffi_headers() -> None:
    from fa3gen.cpu import host

    found = find_spec("tvm_ffi")
    assert found is not None and found.origin is not None
    include = Path(found.origin).parent / "include"
    text = (include / "tvm/ffi/c_api.h").read_text() + (include / "dlpack/dlpack.h").read_text()
    numbers = {name: int(value) for name, value in re.findall(r"^\s*(k\w+) = (\d+)U?,", text, re.MULTILINE)}
    kinds = {"kTVMFFINone": 0, "kTVMFFIInt": 1, "kTVMFFIBool": 2, "kTVMFFIFloat": 3, "kTVMFFIDLTensorPtr": 7}
    assert {name: numbers[name] for name in kinds} == kinds
    assert list(kinds.values()) == [host._NONE, host._INT, host._BOOL, host._FLOAT, host._TENSOR]
    assert numbers["kDLCUDA"] == host._DL_CUDA
    codes = {
        torch.float32: "kDLFloat",
        torch.float16: "kDLFloat",
        torch.bfloat16: "kDLBfloat",
        torch.float8_e4m3fn: "kDLFloat8_e4m3fn",
        torch.float8_e5m2: "kDLFloat8_e5m2",
        torch.int32: "kDLInt",
        torch.uint8: "kDLUInt",
        torch.bool: "kDLBool",
    }
    for dtype, name in codes.items():
        assert host._DL_TYPES[dtype] == (numbers[name], 8 * dtype.itemsize), dtype


# Lifetime


def test_programs_may_be_collected_or_live_until_the_end(tmp_path: Path) -> None:
    """The engine runs a destructor of the host code; by then its callbacks may be gone, and Python as well."""
    text = tmp_path / "host.mlir"
    text.write_text(compiled(STEM).host_module)
    script = f"""
import gc, torch
from fa3gen.cpu.host import HostProgram
class Owner:
    def __init__(self):
        self.program = HostProgram(open({str(text)!r}).read(), self.on_launch)
    def on_launch(self, launch):
        pass
tensors = [torch.zeros(1, 64, 2, 128, dtype=torch.bfloat16) for _ in range(4)] + [torch.zeros(1, 2, 64)]
for _ in range(3):
    owner = Owner()
    owner.program(*tensors, 1.0)
    del owner
    assert gc.collect() > 0
last = Owner()
last.program(*tensors, 1.0)
last.itself = last
print("done")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_recorded_parameters_match_the_ptx() -> None:
    """`hosting` reads as many parameters as the kernel has; a pointer short would be a null pointer here."""
    recorded: RecordedProgram = program(STEM)
    recorded.launch(*tensors(), SCALE)
    assert [len(parameter) for parameter in recorded.launches[-1][1]] == recorded.sizes


def test_a_tensor_ends_with_the_16_bytes_that_its_last_element_is_in() -> None:
    """As far as there is memory: TMA stores whole 16 bytes, past the end of a slice of wider rows."""
    from fa3gen.cpu.kernel import _extent

    matrix = torch.empty(3, 16, dtype=torch.bfloat16)
    assert _extent(matrix) == 96 and _extent(matrix[:0]) == 0
    assert _extent(matrix[:, :11]) == 96  # 2 x 32 + 22, rounded up
    assert _extent(matrix[1:, :3]) == 48  # 32 + 6, rounded up
    assert _extent(torch.empty(21, dtype=torch.bfloat16)) == 42  # no memory behind it
