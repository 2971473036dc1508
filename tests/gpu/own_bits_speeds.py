"""What the same bits in any batch cost packed sequences and pages, and where which kind of modules is faster.

    python tests/gpu/own_bits_speeds.py [--page 16] [--mask none]     on a machine with a Hopper GPU, from a checkout

times, for lists of lengths as chats, documents and decoding steps have them, from CUDA graphs in shuffled rounds: the
call as usual (free), with split_keys (own), the module in which a CTA has a part of the keys (parts), the one in which
a CTA has them all and adds parts up (whole), and a module that does not split keys (unsplit), as deterministic_batch
takes. It prints a Markdown table of speeds over that of the free call, and no record.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import fa3gen  # noqa: E402
from fa3gen.design.family import Family, PackedShape  # noqa: E402
from fa3gen.design.splits import KEYS_OF_PAGED_PARTS  # noqa: E402
from fa3gen.design.workspace import Workspace  # noqa: E402
from fa3gen.measure.bench import require_hopper  # noqa: E402
from fa3gen.measure.packed_cells import DECODING_LENGTHS, HEADS, PACKED_LENGTHS  # noqa: E402
from fa3gen.measure.packed_speeds import Inputs  # noqa: E402
from fa3gen.measure.tuning.measuring import CudaTimer, in_turns  # noqa: E402
from fa3gen.records.packed_records import PackedProblem  # noqa: E402
from fa3gen.run.launch import load_for_launch  # noqa: E402
from fa3gen.spec.model import CausalMask, NoMask  # noqa: E402

BURST_MS, ROUNDS = 8.0, 7
MOST_BYTES = 2**31  # of parts: longer lists have the other kind


def runs_of(problem: PackedProblem, device: torch.device, ways: dict[str, str]) -> dict[str, float]:
    """Milliseconds of each way to compute a cell."""
    made, timer = Inputs.of(problem, device).call, CudaTimer(device)
    q, k, v, rows_q, most_k = made.q, made.k, made.v, made.cu_seqlens_q, made.max_seqlen_k
    named: dict[str, Any] = {"cu_seqlens_k": made.cu_seqlens_k}
    if problem.page is not None:
        named = {"page_table": made.page_table, "seqused_k": made.seqused_k}
    where = list(named.values())
    options: dict[str, Any] = {"causal": isinstance(problem.family.mask, CausalMask), **named}
    options |= {"max_seqlen_q": made.max_seqlen_q, "max_seqlen_k": most_k}
    runs, kept = {}, []
    for way, stem in ways.items():
        out = torch.full_like(q, math.nan)
        kept.append(out)  # a graph writes to it
        module, told = None, {}
        if stem:
            module = load_for_launch(Workspace.find(ROOT).module_path(stem))
            told = {"max_seqlen_k": most_k} if way == "parts" else {}

        def launch(
            keys: int | None = KEYS_OF_PAGED_PARTS[problem.head_dim] if way == "own" else None,
            module: Any = module,
            out: torch.Tensor = out,
            told: Any = told,
        ) -> torch.Tensor:
            if module is not None:
                return module.attention(q, k, v, rows_q, *where, out=out, **told)
            return fa3gen.attention_packed(q, k, v, rows_q, out=out, split_keys=keys, **options)

        launch()
        run, captured = timer.burst(launch, max(1, math.ceil(BURST_MS / timer.once(launch))))
        assert captured, way
        runs[way] = run
    alike = [out for way, out in zip(ways, kept, strict=True) if way in ("own", "parts", "whole")]
    assert all(out.equal(alike[0]) for out in alike), f"other bits: {problem.label}"
    return {way: statistics.median(times) for way, times in in_turns(runs, ROUNDS).items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--page", type=int, default=None, help="rows of a page, a multiple of 16; without: packed")
    parser.add_argument("--mask", choices=("causal", "none"), default="causal")
    asked = parser.parse_args()
    device, layout = require_hopper(), "packed" if asked.page is None else "paged"
    mask, end = (CausalMask(), "_causal") if asked.mask == "causal" else (NoMask(), "")
    print(
        "| lengths | head dim | heads | free, ms | own | parts | whole | unsplit |\n|---|---|---|---|---|---|---|---|"
    )
    for head_dim in (128, 64):
        family = Family("bf16", head_dim, head_dim, mask, layout=layout, page_rows=asked.page)
        for heads in HEADS[head_dim]:
            for name, lengths in (*PACKED_LENGTHS.items(), *DECODING_LENGTHS.items()):
                ways = {"free": "", "own": ""}
                bytes_of_parts = 4 * sum(lengths[0]) * heads[0] * head_dim * -(-max(lengths[1]) // 384)
                if bytes_of_parts <= MOST_BYTES:
                    ways["parts"] = f"fwd_{layout}_decode_fixed_d{head_dim}{end}"
                room = {128: 4, 64: 8}[head_dim]
                pack = f"_pack{room}" * (heads[0] // heads[1] % room == 0)
                ways["whole"] = f"fwd_{layout}_fixed{'_pack' if pack else ''}_d{head_dim}{end}"
                ways["unsplit"] = f"fwd_{layout}{pack}_d{head_dim}{end}"
                problem = PackedProblem.of(family, name, PackedShape(*lengths, *heads))
                times = runs_of(problem, device, ways)
                speeds = (f"{times['free'] / times[way]:.3f}" if way in times else "" for way in list(ways)[1:])
                told = dict(zip(list(ways)[1:], speeds, strict=True))
                cells = " | ".join(told.get(way, "") for way in ("own", "parts", "whole", "unsplit"))
                print(f"| {name} | {head_dim} | {heads[0]}/{heads[1]} | {times['free']:.4f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
