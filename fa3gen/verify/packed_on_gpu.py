"""Run a module for packed sequences on a GPU: the criteria of `fa3gen.verify.attention_on_gpu`, sequence by sequence.

A block of query rows is one sequence's. Besides: `out` and LSE stay as they were in all rows that no sequence uses,
whatever offsets and lengths say, and a CUDA graph takes the lengths that its tensors have when it is replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fa3gen.design.splits import whole_parts
from fa3gen.verify import packed_inputs
from fa3gen.verify.attention_on_gpu import Runner, wrote_outside
from fa3gen.verify.inputs import Case, Inputs, poison, served
from fa3gen.verify.packed_inputs import PackedCase, PackedInputs, sequences

REPLAYS = 3
# Of the checks: the same rows, cut in two ways.
LENGTHS_Q, LENGTHS_K = (70, 0, 33), (140, 9, 20)
OTHER_LENGTHS_Q, OTHER_LENGTHS_K = (1, 90, 12), (0, 100, 69)


class PackedRunner(Runner):
    """One module for packed sequences on one device: calls it, measures it, checks it."""

    def _make(self, case: Case) -> PackedInputs:
        assert isinstance(case, PackedCase)
        return packed_inputs.make(self.spec, case, device=self.device, seed=self.seed)

    def _told(self, made: Inputs) -> dict[str, Any]:
        """Keys of the longest sequence, where there is memory for as many parts as the longest one may have."""
        assert isinstance(made, PackedInputs)
        return {"max_seqlen_k": max(made.shape.lengths_k, default=0)} if whole_parts(self.spec) else {}

    # -- checks

    def _tries_on_cuda(self) -> list[tuple[str, Callable[[], str]]]:
        return [
            *super()._tries_on_cuda(),
            ("a graph takes the lengths of its replay", self._graph_of_other_lengths),
            ("two graphs run at once", self._graphs_at_once),
        ]

    def _small(self, **changes: Any) -> PackedInputs:
        """Inputs for the checks: three sequences, one without queries; four query heads on two kv heads."""
        return self._make(self._small_case(**changes))

    def _small_case(self, **changes: Any) -> PackedCase:
        facts = {"lengths_q": LENGTHS_Q, "lengths_k": LENGTHS_K, "heads": (4, 2), "layout": "contiguous"}
        return served(sequences("checks", "inputs of the checks", **{**facts, **changes}), self.spec)

    def _smallest(self) -> PackedInputs:
        return self._small(lengths_q=(5, 1), lengths_k=(9, 3), heads=(1, 1))

    def _empty_batch(self) -> str:
        """Without sequences, without queries, and queries without keys, whose O is 0.

        No more queries than go into two tiles of a sequence: more of them are nothing new, and take the CPU model long.
        """
        positions = self.spec.tile.q // self.spec.tile.pack_heads
        made = self._small(lengths_q=(min(positions + 3, LENGTHS_Q[0]), 0, 3))
        return "; ".join(
            f"{what}: {wrong}"
            for what, changes, rows, zero in self._without(made)
            if (wrong := self._wrong_without(made, changes, rows, zero))
        )

    def _without(self, made: PackedInputs) -> list[tuple[str, dict[str, Any], int, bool]]:
        """What is missing, how a call says so, rows of its O, and whether these are to be zero."""
        nothing = made.cu_seqlens_q.new_zeros(4)
        without_keys = {"k": made.k[:0], "v": made.v[:0], "cu_seqlens_k": nothing}
        return [
            ("no sequences", {"cu_seqlens_q": nothing[:1], "cu_seqlens_k": nothing[:1]}, made.q.shape[0], False),
            ("no queries", {"q": made.q[:0], "cu_seqlens_q": nothing}, 0, False),
            ("no keys", without_keys, made.q.shape[0], True),
            ("no rows", {"q": made.q[:0], "cu_seqlens_q": nothing, **without_keys}, 0, False),
        ]

    def _wrong_without(self, made: PackedInputs, changes: Mapping[str, Any], rows: int, zero: bool) -> str:
        """What is wrong with a call of `rows` queries that see no key; `zero`: all of them are to be written."""
        asked = {"return_lse": True} if self.spec.outputs.lse else {}
        given = {**made.given, **changes}
        given |= {name: factors[: len(given["cu_seqlens_q"]) - 1] for name, factors in made.descales.items()}
        returned = self.entry(**given, **made.named, **asked)
        out, lse = returned if self.spec.outputs.lse else (returned, None)
        wanted = (rows, *made.out.shape[1:])
        if out.shape != wanted or out.dtype != self.out_dtype:
            return f"O is {tuple(out.shape)} {out.dtype} instead of {wanted} {self.out_dtype}"
        if lse is not None and (lse.shape != (wanted[1], rows) or lse.dtype != torch.float32):
            return f"LSE is {tuple(lse.shape)} {lse.dtype} instead of {(wanted[1], rows)} torch.float32"
        empty = -math.inf if made.sinks is None else made.sinks[:, None]
        if zero and (out.any() or (lse is not None and not (lse == empty).all())):
            return "O is not 0, or LSE not -inf (of a head with a sink, that)"
        return ""

    def _bad_batches(self, good: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Offsets and lengths that can be refused without reading them."""
        offsets: torch.Tensor = good["cu_seqlens_q"]
        elsewhere = "cpu" if self.device.type == "cuda" else "meta"
        either = "cu_seqlens_q|cu_seqlens_k"
        every_second = torch.stack([offsets, offsets], dim=1).flatten()[::2]
        yield "int64 offsets", "cu_seqlens_q", {**good, "cu_seqlens_q": offsets.long()}
        yield f"offsets on {elsewhere}", "cu_seqlens_k", {**good, "cu_seqlens_k": offsets.to(elsewhere)}
        yield "offsets of two dimensions", "cu_seqlens_q", {**good, "cu_seqlens_q": offsets[None]}
        yield "offsets that are a list", "cu_seqlens_k", {**good, "cu_seqlens_k": offsets.tolist()}
        yield "offsets with gaps between them", "cu_seqlens_q", {**good, "cu_seqlens_q": every_second}
        yield "no offset at all", either, {**good, "cu_seqlens_q": offsets[:0], "cu_seqlens_k": offsets[:0]}
        yield "fewer sequences of keys than of queries", either, {**good, "cu_seqlens_k": offsets[:-1]}
        for name in ("seqused_q", "seqused_k"):
            yield f"{name} of another size", name, {**good, name: offsets}
            yield f"int64 {name}", name, {**good, name: offsets[1:].long()}
            yield f"{name} on {elsewhere}", name, {**good, name: offsets[1:].to(elsewhere)}

    def _bad_scores(self, good: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """As of dense tensors, and factors of Q, K and V."""
        yield from super()._bad_scores(good)
        elsewhere = "cpu" if self.device.type == "cuda" else "meta"
        for name in ("q_descale", "k_descale", "v_descale"):
            if (factors := good.get(name)) is not None:
                yield f"{name} of one head fewer", name, {**good, name: factors[:, :-1]}
                yield f"{name} of one sequence fewer", name, {**good, name: factors[:-1]}
                yield f"{name} in float64", name, {**good, name: factors.double()}
                yield f"{name} on {elsewhere}", name, {**good, name: factors.to(elsewhere)}

    def _graph_of_other_lengths(self) -> str:
        """One after the other other lengths, and those of the capture."""
        same = {"used_q": LENGTHS_Q, "used_k": LENGTHS_K}
        cut = {"lengths_q": OTHER_LENGTHS_Q, "lengths_k": OTHER_LENGTHS_K}
        other = self._small(**cut, used_q=(1, 80, 12), used_k=(0, 50, 69))
        return self.wrong_replays(self._small(**same), [other, self._small(**same)])

    def wrong_replays(self, made: PackedInputs, others: Sequence[PackedInputs]) -> str:
        """Capture a call; replay it with each of these offsets and lengths in its own tensors. What is wrong then.

        `made` has to use all of its rows, and the others are of the same sizes.
        """
        graph, wrong = self._captured(made), []
        for other in others:
            for name, numbers in made.given.items():
                if numbers.dtype == torch.int32:
                    numbers.copy_(other.given[name])
            poison(made.out_storage)
            graph.replay()
            wrong.append(self._wrong(replace(made, spans=other.spans)))
        return "; ".join(filter(None, wrong))

    def _graphs_at_once(self) -> str:
        """Two graphs on two streams, a few times each, held back until both are queued."""
        calls = self._small(), self._small(lengths_q=OTHER_LENGTHS_Q, lengths_k=OTHER_LENGTHS_K)
        graphs = [self._captured(made) for made in calls]
        for made in calls:
            poison(made.out_storage)
        streams = [torch.cuda.Stream(self.device) for _ in calls]  # type: ignore[no-untyped-call]
        torch.cuda._sleep(40_000_000)  # type: ignore[no-untyped-call]  # cycles: about 20 ms
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        for _ in range(REPLAYS):
            for stream, graph in zip(streams, graphs, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize(self.device)
        return "; ".join(filter(None, map(self._wrong, calls)))

    def _wrong(self, made: PackedInputs) -> str:
        """What is wrong with `out` after a call on poison."""
        return "; ".join(filter(None, (self._wrong_o(made, made.out), *wrote_outside(made, None))))

    def _captured(self, made: PackedInputs) -> Any:
        """A graph of one call with `out` given."""
        self.entry(**made.given, **made.named, out=made.out)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.entry(**made.given, **made.named, out=made.out)
        return graph
