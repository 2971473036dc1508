"""GEMM modules on a GPU beside the CPU model with the tensor core's sums: other bits, and the error of FP8 over k.

    python tests/gpu/gemm_sums.py [STEM ...]     on a machine with a Hopper GPU; a table in Markdown

All numbers are positive, so that what the tensor core cuts off adds up. *GPU* and *model*: the mean of D over the mean
of the exact product, less 1. Rounding D to bfloat16 leaves at most 2^-9 (0.2 %) of it in every element, of either sign.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from fa3gen.base import markdown
from fa3gen.cpu.kernel import Settings
from fa3gen.cpu.module import load_on_cpu
from fa3gen.design.workspace import Workspace
from fa3gen.run import gpu
from fa3gen.run.launch import load_for_launch
from fa3gen.spec.model import Gemm
from fa3gen.verify import gemm_inputs, reference
from fa3gen.verify.gemm_inputs import GemmCase
from fa3gen.verify.runner import same_bits

ROWS, COLUMNS = 40, 48  # a tile at most: the model takes as long for any part of one
DEPTHS = (128, 512, 2048, 8192)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sums:
    """D of one module and one k: whether both sides have the same bits, and by how much each is too small or large."""

    stem: str
    k: int
    same: bool
    gpu_bias: float
    cpu_bias: float


def compare(stem: str, k: int, device: torch.device) -> Sums:
    """Run the module on both sides, on the same numbers."""
    workspace = Workspace.find(Path(__file__).parent)
    [variant] = workspace.resolve(stem)
    assert isinstance(variant.spec, Gemm)
    on_cpu = load_on_cpu(workspace.module_path(stem))
    on_cpu.cpu.settings = Settings(sums="tensor_core")
    found, exact = [], torch.empty(0)
    for module, where in ((load_for_launch(workspace.module_path(stem)), device), (on_cpu, CPU)):
        made = gemm_inputs.make(variant.spec, GemmCase("sums", "", ROWS, COLUMNS, k), device=where, seed=1)
        for tensor in made.given.values():
            tensor.copy_(tensor.float().abs())
        found.append(module.matmul(*made.given.values(), out=made.out).cpu())
        exact = reference.matmul(made.given["a"], made.given["b"], made.c).cpu()
    biases = [((out.double() - exact).mean() / exact.mean()).item() for out in found]
    return Sums(stem, k, same_bits(*found), *biases)


def main() -> None:
    """Print the table of the modules named on the command line, or of those of FP8."""
    device = gpu.hopper_device()
    if device is None:
        sys.exit(gpu.why_no_hopper())
    rows = [compare(stem, k, device) for stem in sys.argv[1:] or ("g3_fp8", "g3_fp8_two_levels") for k in DEPTHS]
    print(
        *markdown.table(
            ["module", "k", "bits", "GPU", "model"],
            [
                [
                    f"`{row.stem}`",
                    f"{row.k:,}",
                    "same" if row.same else "other",
                    f"{row.gpu_bias:+.2%}",
                    f"{row.cpu_bias:+.2%}",
                ]
                for row in rows
            ],
        ),
        sep="\n",
    )


if __name__ == "__main__":
    main()
