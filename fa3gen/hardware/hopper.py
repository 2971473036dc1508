"""What the hardware gives: sm_90a (H100, H200) limits that a spec must respect.

Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", column 9.0; PTX ISA,
"Asynchronous Warpgroup Level Matrix Instructions" (wgmma) and "Parallel Synchronization: mbarrier"; CUDA Driver API,
`cuTensorMapEncodeTiled`.
"""

from __future__ import annotations

# CUDA C++ Programming Guide: 227 KB of shared memory for one thread block.
SMEM_PER_CTA = 227 * 1024
SMEM_PER_SM = 228 * 1024  # for all thread blocks of a multiprocessor (compute capability 9.0, "Shared Memory")
SMEM_RESERVED = 1024  # of each CTA, by the system
# CUDA C++ Programming Guide: 64 K 32-bit registers per multiprocessor, at most 255 for one thread.
REGISTERS_PER_SM = 65536
REGISTERS_PER_THREAD = 255
# Registers are handed out to warps in units of 256, that is 8 for each thread of a warp.
REGISTER_UNIT_PER_THREAD = 8
# PTX ISA, "setmaxnreg": 24 to 256 in steps of 8.
SETMAXNREG_MIN = 24
THREADS_PER_CTA = 1024
WARP = 32
# PTX ISA, "Warpgroup": four contiguous warps.
WARPGROUP = 128

# cuTensorMapEncodeTiled: boxDim[i] <= 256, globalStrides[i] a multiple of 16 bytes.
TMA_BOX = 256
TMA_STRIDE_ALIGN = 16
TMA_RANK = 5  # dimensions of a tensor map, tensorRank
TMA_SMEM_ALIGN = 128  # bytes, of a box in shared memory (PTX ISA, cp.async.bulk.tensor)

# PTX ISA, "Asynchronous Warpgroup Level Matrix Shape": m64nNk16 for 16-bit operands, N a multiple of 8 up to 256.
WGMMA_M = 64
WGMMA_N_STEP = 8
WGMMA_N_MAX = 256
WGMMA_K_16BIT = 16
# PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".
MMA_M, MMA_N, MMA_K = 16, 8, 16

# Bytes of contiguous data after which a swizzle pattern of the matrix descriptor repeats. Without a swizzle the unit is
# a row of the 8 x 16 byte core matrix (PTX ISA, "Strides" and "Matrix Descriptor Format" of wgmma).
SWIZZLE_SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
SWIZZLE_ROWS = 8  # after which each of them repeats: those of a core matrix
SWIZZLE_BITS = {"none": 0, "32B": 1, "64B": 2, "128B": 3}  # of the number of a 16-byte unit, that the row changes

# PTX ISA, "Size and alignment of mbarrier object".
MBARRIER_BYTES = 8

# bf16 and fp16 elements.
BYTES_16BIT = 2


def registers_at_launch(threads: int) -> int:
    """Registers that each thread of a CTA which has an SM to itself can be launched with."""
    share = REGISTERS_PER_SM // threads // REGISTER_UNIT_PER_THREAD * REGISTER_UNIT_PER_THREAD
    return min(REGISTERS_PER_THREAD, share)
