"""Call each module on small ragged shapes. Run by test_production.py under compute-sanitizer, in a process of its own.

Usage: memcheck.py [--short-output] STEM... With --short-output, O has memory for half of its rows only: the control, by
which one sees that the sanitizer does look.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import fa3gen
from fa3gen.design.workspace import Workspace
from fa3gen.spec.specfile import Variant
from fa3gen.verify import inputs

NAMES = ("ragged", "ragged_more_queries", "few_keys", "tile_edge", "one", "gqa", "odd_strides")
CASES = [case for case in inputs.CASES if case.name in NAMES]


def run(variant: Variant, short_output: bool) -> None:
    """All cases of one module, with LSE where it has one."""
    spec, module = variant.spec, fa3gen.load(variant.stem)
    options = {"return_lse": True} if spec.outputs.lse else {}
    for case in CASES:
        made = inputs.make_for(spec, inputs.served(case, spec), device=torch.device("cuda"), seed=1)
        # Tensors without the rows around them: what is outside is outside of the allocation.
        q, k, v = (x.clone() for x in (made.q, made.k, made.v))
        out = torch.empty_like(made.out, memory_format=torch.contiguous_format)
        if short_output:
            out.untyped_storage().resize_(out.untyped_storage().nbytes() // 2)
        module.attention(q, k, v, out=out, **made.named, **options)
        torch.cuda.synchronize()
    print(f"ran {variant.stem}", flush=True)


def main() -> None:
    """Run the modules named on the command line."""
    stems = [argument for argument in sys.argv[1:] if argument != "--short-output"]
    workspace = Workspace.find(Path(__file__).parent)
    for stem in stems:
        (variant,) = workspace.resolve(stem)
        run(variant, "--short-output" in sys.argv)


if __name__ == "__main__":
    main()
