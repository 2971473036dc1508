"""cuDNN's attention of 8 bits, by its frontend (package nvidia-cudnn-frontend): torch's SDPA takes no such tensors.

On Hopper it writes O in 8 bits as well. The operation: "SDPA FP8 forward" of
https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

FACTORS = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")


def attention_by_cudnn(q: Any, k: Any, v: Any, *, causal: bool) -> Callable[[], torch.Tensor]:
    """A function that returns O, (batch, seq, heads, d) in e4m3, of tensors of that layout; all factors are one.

    It launches on torch's current stream, and can be captured. Causal masks are aligned to the top left, so that
    queries and keys have to be as many. Raises ImportError where the frontend is not installed, and cuDNN's own errors
    where it has no kernel.
    """
    cudnn = importlib.import_module("cudnn")
    handle, out = cudnn.create_handle(), torch.empty_like(q)
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.FP8_E4M3,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )

    def layout(x: torch.Tensor) -> dict[str, list[int]]:
        """cuDNN counts heads before the sequence, wherever they lie."""
        heads_first = x.transpose(1, 2)
        return {"dim": list(heads_first.shape), "stride": list(heads_first.stride())}

    e4m3, one = cudnn.data_type.FP8_E4M3, torch.ones((1, 1, 1, 1), device=q.device)
    scalar = {"dim": [1] * 4, "stride": [1] * 4}
    given = {name: graph.tensor(name=name, **layout(x), data_type=e4m3) for name, x in (("q", q), ("k", k), ("v", v))}
    factors = {name: graph.tensor(name=name, **scalar, data_type=cudnn.data_type.FLOAT) for name in FACTORS}
    scale = q.shape[-1] ** -0.5
    made, _, *largest = graph.sdpa_fp8(
        **given, **factors, attn_scale=scale, use_causal_mask=causal, generate_stats=False, name="attention"
    )
    made.set_output(True).set_dim(layout(out)["dim"]).set_stride(layout(out)["stride"]).set_data_type(e4m3)
    for unasked in largest:
        unasked.set_output(False).set_dim([1] * 4).set_stride([1] * 4).set_data_type(cudnn.data_type.FLOAT)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=q.device)
    named = {"q": q, "k": k, "v": v, **dict.fromkeys(FACTORS, one)}
    tensors = {described: named[name] for name, described in (given | factors).items()} | {made: out}

    def launch() -> torch.Tensor:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(q.device).cuda_stream)
        graph.execute(tensors, workspace, handle=handle)
        return out

    return launch
