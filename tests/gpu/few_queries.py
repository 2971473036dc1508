"""Few queries on long keys by the public calls, dense, packed and in pages, beside torch: a line for each combination.

    python tests/gpu/few_queries.py [d64 d128 d256]     on a machine with a Hopper GPU, from the root of a checkout

times all combinations of head dims, groups of query heads and numbers of queries, 8 sequences of 4,096 keys of 8 heads
without a mask, as fa3gen.attention and fa3gen.attention_packed serve them, and the faster one of torch's cuDNN and
flash attention, which take dense tensors only. All of a combination take turns, in rounds of shuffled order, replayed
from CUDA graphs. It prints a Markdown table and writes nothing: TFLOP/s where more than 160 rows share a head of k and
v, which the tensor cores bound, and GB/s of q, k, v and O else, which memory does. K and V are 67 to 268 MB, more than
the L2 holds. `combinations` and `Call` are those of test_few_queries.py, too.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from packed_modules import offsets  # noqa: E402

import fa3gen  # noqa: E402
from fa3gen.measure.bench import require_hopper  # noqa: E402
from fa3gen.measure.peers import PEERS, Unavailable  # noqa: E402
from fa3gen.measure.tuning.measuring import CudaTimer, in_turns  # noqa: E402
from fa3gen.spec.model import NoMask  # noqa: E402

HEAD_DIMS, GROUPS, QUERIES = (64, 128, 256), (1, 4, 5, 8, 12, 16), (1, 2, 4, 8, 16)
LAYOUTS = "dense", "packed", "paged"
PAGE = 64
SEQUENCES, KEYS, HEADS_KV = 8, 4096, 8
MEMORY_BOUND_ROWS = 160  # of a head of k and v: FLOP for each byte at which the tensor cores and HBM take as long
BURST_MS, ROUNDS, SEED = 8.0, 7, 0
PEER_NAMES = "cuDNN (torch SDPA)", "flash (torch SDPA)"


def combinations(head_dims: Sequence[int] = HEAD_DIMS) -> Iterator[tuple[int, int, int]]:
    """Head dim, query heads of each head of k and v, and queries."""
    for dim in head_dims:
        for group in GROUPS:
            yield from ((dim, group, queries) for queries in QUERIES)


@dataclass(frozen=True)
class Call:
    """Sequences of as many queries each, on keys of these lengths; dense calls need keys of one length.

    q: (total_q, heads_q, d), k, v: (total_k, heads_kv, d).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    queries: int
    lengths: tuple[int, ...]

    @classmethod
    def of(
        cls, device: Any, dim: int, group: int, queries: int, lengths: Sequence[int], heads_kv: int = HEADS_KV
    ) -> Call:
        """Random tensors, the same for the same sizes."""
        generator = torch.Generator(device).manual_seed(SEED)
        shapes = (len(lengths) * queries, heads_kv * group, dim), *[(sum(lengths), heads_kv, dim)] * 2
        q, k, v = (torch.randn(x, generator=generator, device=device).to(torch.bfloat16) for x in shapes)
        return cls(q, k, v, queries, tuple(lengths))

    @property
    def dense(self) -> tuple[torch.Tensor, ...]:
        """The same as (batch, seq, heads, d)."""
        keys = self.lengths[0]
        return self.q.unflatten(0, (-1, self.queries)), *(x.unflatten(0, (-1, keys)) for x in (self.k, self.v))

    def ready(self, layout: str, **options: Any) -> Callable[[], Any]:
        """The public call, with all that it needs at hand."""
        if layout == "dense":
            tensors = self.dense
            return lambda: fa3gen.attention(*tensors, **options)
        device, sequences = self.q.device, len(self.lengths)
        begins_q = offsets([self.queries] * sequences, device)
        longest: dict[str, Any] = {"max_seqlen_q": self.queries, "max_seqlen_k": max(self.lengths), **options}
        if layout == "packed":
            begins_k = offsets(self.lengths, device)
            return lambda: fa3gen.attention_packed(self.q, self.k, self.v, begins_q, begins_k, **longest)
        k, v, table = in_pages((self.k, self.v), self.lengths)
        paged = {**longest, "page_table": table, "seqused_k": torch.tensor(self.lengths, device=device).int()}
        return lambda: fa3gen.attention_packed(self.q, k, v, begins_q, **paged)


def in_pages(tensors: Sequence[torch.Tensor], lengths: Sequence[int], page: int = PAGE) -> tuple[torch.Tensor, ...]:
    """The rows of all sequences in pages that lie in any order, NaN where a page has no rows; and the pages' table."""
    device, counts = tensors[0].device, [-(-length // page) for length in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(SEED))
    begins, firsts = offsets(lengths).tolist(), offsets(counts).tolist()
    found, table = [], torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
    for x in tensors:
        pages = x.new_full((sum(counts), page, *x.shape[1:]), math.nan)
        for number, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            rows = x.new_full((count * page, *x.shape[1:]), math.nan)
            rows[:length] = x[begins[number] : begins[number] + length]
            table[number, :count] = at = order[firsts[number] : firsts[number] + count]
            pages[at.to(device)] = rows.unflatten(0, (count, page))
        found.append(pages)
    return *found, table.to(device)


def peers_of(call: Call) -> dict[str, Callable[[], Any]]:
    """torch's attention by name, of those that take these tensors."""
    able: dict[str, Callable[[], Any]] = {}
    for peer in PEERS:
        if peer.name in PEER_NAMES:
            try:
                attend = peer.prepare(NoMask())
                attend(*call.dense)
            except (Unavailable, RuntimeError):  # torch: "No available kernel"
                continue
            able[peer.name] = lambda attend=attend: attend(*call.dense)  # type: ignore[misc]
    return able


def milliseconds(timer: CudaTimer, launches: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Medians over rounds in which all take turns."""
    runs = {}
    for name, launch in launches.items():
        run, captured = timer.burst(launch, max(1, math.ceil(BURST_MS / timer.once(launch))))
        if not captured:
            raise RuntimeError(f"{name} could not be captured in a CUDA graph; run it alone to see why")
        runs[name] = run
    return {name: statistics.median(found) for name, found in in_turns(runs, ROUNDS).items()}


def line(timer: CudaTimer, dim: int, group: int, queries: int) -> str:
    """One row of the table."""
    call = Call.of(timer.device, dim, group, queries, (KEYS,) * SEQUENCES)
    launches = {layout: call.ready(layout) for layout in LAYOUTS}
    for launch in launches.values():
        launch()  # compiled, before anything is timed
    peers = peers_of(call)
    times = milliseconds(timer, {**launches, **peers})
    rows = group * queries
    if rows > MEMORY_BOUND_ROWS:
        unit, amount = "TFLOP/s", 4 * dim * KEYS * len(call.q) * call.q.shape[1] / 1e9
    else:
        unit, amount = "GB/s", 2 * (2 * call.q.numel() + call.k.numel() + call.v.numel()) / 1e6
    speeds = {name: amount / time for name, time in times.items()}
    best = max(peers, key=lambda name: speeds[name], default=None)
    beside = ["–", "–", "–"]
    if best is not None:
        beside = [best, f"{speeds[best]:.0f}", f"{speeds['dense'] / speeds[best]:.2f}"]
    ours = [f"{speeds[layout]:.0f}" for layout in LAYOUTS]
    return f"| {' | '.join([str(dim), str(group), str(queries), str(rows), unit, *ours, *beside])} |"


def main(wanted: Sequence[str]) -> None:
    """Print the table, of some head dims or all."""
    head_dims = [dim for dim in HEAD_DIMS if not wanted or f"d{dim}" in wanted]
    if not head_dims:
        sys.exit(f"{' '.join(wanted)}: name some of {', '.join(f'd{dim}' for dim in HEAD_DIMS)}, or none for all")
    timer = CudaTimer(require_hopper())
    print(f"{torch.cuda.get_device_name(timer.device)}, torch {torch.__version__}: {SEQUENCES} x {KEYS} keys\n")
    names = "head dim", "group", "queries", "rows", "unit", *LAYOUTS, "best of torch", "its speed", "dense / torch"
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    with torch.no_grad():
        for combination in combinations(head_dims):
            print(line(timer, *combination), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
