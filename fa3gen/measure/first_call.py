"""Times the first call of a generated module in a fresh process. Run by `fa3gen.measure.launch_times`, for one module.

Usage: python -m fa3gen.measure.first_call MODULE.py DTYPE HEAD_DIM HEAD_DIM_V NAME... Prints the seconds from
importing the module to the end of its first call on the GPU; NAME are inputs whose sequence is contiguous, and those
that a call gives by name. Importing torch and making the CUDA context, which every program does, come first.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch


def main() -> None:
    """Time one call on a small problem."""
    from fa3gen.measure.launch_times import small_problem
    from fa3gen.run.launch import load_for_launch
    from fa3gen.verify.inputs import usual_keywords

    path, dtype, head_dim, head_dim_v, *names = sys.argv[1:]
    device = torch.device("cuda", torch.cuda.current_device())
    q, k, v = small_problem(dtype, int(head_dim), int(head_dim_v), device, names)
    named = usual_keywords(names, q.shape[2], device)
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    load_for_launch(Path(path)).attention(q, k, v, **named)
    torch.cuda.synchronize(device)
    print(time.perf_counter() - started)


if __name__ == "__main__":
    main()
