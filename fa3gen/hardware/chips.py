"""What the two Hopper chips can do in a clock cycle, in figures with their sources.

`fa3gen.hardware.hopper` has the limits that a spec must respect; here are the rates that bound how fast a legal kernel
can be. All are peaks. A kernel that keeps the tensor cores busy draws so much power that the clock falls below
`clock_hz`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa3gen.base.errors import UserError

_WHITEPAPER = "NVIDIA H100 Tensor Core GPU Architecture (whitepaper), table of H100 and A100 specifications"
_THROUGHPUT = 'CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions", compute capability 9.0'


@dataclass(frozen=True)
class Rate:
    """A figure, its unit, and where it comes from."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Chip:
    """One GPU. Rates of an SM are per clock cycle of that SM; `l2` is of the whole chip."""

    key: str
    name: str
    sms: int
    clock_hz: Rate
    tensor: Rate
    fp32: Rate
    exp2: Rate
    issue: Rate
    smem: Rate
    l2: Rate
    hbm: Rate
    l2_bytes: int

    def tensor_rate(self, operand_bytes: int) -> float:
        """FLOP of an SM per cycle for operands of so many bytes each: of 8 bits twice as many as of 16 (the same)."""
        return self.tensor.value * 2 / operand_bytes

    def tensor_tflops(self, operand_bytes: int) -> float:
        """Peak of the tensor cores for operands of so many bytes each, TFLOP/s."""
        return self.tensor_rate(operand_bytes) * self.sms * self.clock_hz.value / 1e12


def _hopper(key: str, name: str, hbm: Rate) -> Chip:
    """H100 SXM5 and H200 have the same die; only the memory is another one."""
    return Chip(
        key=key,
        name=name,
        sms=132,
        clock_hz=Rate(1830e6, "Hz", "989.4 TFLOP/s of the data sheets over 132 SMs x 4096 FLOP per cycle"),
        tensor=Rate(4096, "FLOP/clk/SM", f"{_WHITEPAPER}: 4 tensor cores x 512 FMA, 16-bit operands, dense"),
        fp32=Rate(128, "FMA/clk/SM", _THROUGHPUT),
        exp2=Rate(16, "ex2/clk/SM", f"{_THROUGHPUT}: base-2 exponential"),
        issue=Rate(4, "warp instructions/clk/SM", f"{_WHITEPAPER}: 4 warp schedulers, one instruction each"),
        smem=Rate(128, "bytes/clk/SM", 'CUDA C++ Programming Guide, "Shared Memory": 32 banks x 4 bytes'),
        # NVIDIA gives no figure for H100; published microbenchmarks of it reach less.
        l2=Rate(5120, "bytes/clk", "NVIDIA A100 Tensor Core GPU Architecture (whitepaper): L2 read bandwidth"),
        hbm=hbm,
        l2_bytes=50 * 2**20,
    )


H100 = _hopper("h100", "H100 SXM", Rate(3.35e12, "bytes/s", "NVIDIA H100 data sheet: SXM, HBM3"))
H200 = _hopper("h200", "H200 SXM", Rate(4.8e12, "bytes/s", "NVIDIA H200 data sheet: HBM3e"))
CHIPS = {chip.key: chip for chip in (H100, H200)}


def select(keys: list[str] | None) -> list[Chip]:
    """The chips of these names in lower or upper case, each once; all for None. UserError for an unknown name."""
    unknown = [key for key in keys or [] if key.lower() not in CHIPS]
    if unknown:
        raise UserError(f"--chip {unknown[0]}: there are figures for {' and '.join(CHIPS)}")
    return [CHIPS[key] for key in dict.fromkeys(key.lower() for key in keys or CHIPS)]
