"""Run a module with K and V in pages on a GPU: the criteria of `fa3gen.verify.packed_on_gpu`, with tables as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from fa3gen.design import footprint
from fa3gen.verify import paged_inputs
from fa3gen.verify.inputs import Case
from fa3gen.verify.packed_inputs import PackedInputs
from fa3gen.verify.packed_on_gpu import PackedRunner
from fa3gen.verify.paged_inputs import PagedCase, PagedInputs


class PagedRunner(PackedRunner):
    """One module with K and V in pages on one device: calls it, measures it, checks it."""

    def _make(self, case: Case) -> PagedInputs:
        assert isinstance(case, PagedCase)
        return paged_inputs.make(self.spec, case, device=self.device, seed=self.seed)

    # -- checks

    def _small_case(self, **changes: Any) -> PagedCase:
        """As of packed sequences; all pages hold ordinary numbers."""
        (paged,) = paged_inputs.in_pages([super()._small_case(**changes)], self.spec)
        return replace(paged, filled=True)

    def _without(self, made: PackedInputs) -> list[tuple[str, dict[str, Any], int, bool]]:
        assert isinstance(made, PagedInputs) and made.seqused_k is not None
        rows, nothing = made.q.shape[0], made.cu_seqlens_q.new_zeros(4)
        without_queries = {"q": made.q[:0], "cu_seqlens_q": nothing}
        no_sequences = {"cu_seqlens_q": nothing[:1], "page_table": made.page_table[:0], "seqused_k": nothing[:0]}
        without_pages = {"k": made.k[:0], "v": made.v[:0]}
        return [
            ("no sequences", no_sequences, rows, False),
            ("no queries", without_queries, 0, False),
            ("no keys", {"seqused_k": nothing[:3]}, rows, True),
            ("no pages", without_pages, rows, True),
            ("an empty table", {"page_table": made.page_table[:, :0]}, rows, True),
            ("no rows", {**without_queries, **without_pages}, 0, False),
        ]

    def _bad_batches(self, good: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Offsets, tables and lengths that can be refused without reading them."""
        offsets, table, used = good["cu_seqlens_q"], good["page_table"], good["seqused_k"]
        elsewhere = "cpu" if self.device.type == "cuda" else "meta"
        every_second = torch.stack([table, table], dim=2).flatten(1)[:, ::2]
        yield "int64 offsets", "cu_seqlens_q", {**good, "cu_seqlens_q": offsets.long()}
        yield "no offset at all", "cu_seqlens_q", {**good, "cu_seqlens_q": offsets[:0]}
        yield f"a table on {elsewhere}", "page_table", {**good, "page_table": table.to(elsewhere)}
        yield "an int64 table", "page_table", {**good, "page_table": table.long()}
        yield "a table that is a list", "page_table", {**good, "page_table": table.tolist()}
        yield "a table of one dimension", "page_table", {**good, "page_table": table[0]}
        yield "a table with gaps in its rows", "page_table", {**good, "page_table": every_second}
        yield "a table of fewer sequences", "page_table|seqused_k", {**good, "page_table": table[:-1]}
        yield "lengths of fewer sequences", "page_table|seqused_k", {**good, "seqused_k": used[:-1]}
        yield "int64 lengths", "seqused_k", {**good, "seqused_k": used.long()}
        yield "pages of v of another size", "k|v", {**good, "v": good["v"][:, :-1]}
        yield "fewer pages of v", "k|v", {**good, "v": good["v"][:-1]}
        yield "seqused_q of another size", "seqused_q", {**good, "seqused_q": offsets}
        least = footprint.page_rows(self.spec) or 1
        if least > 1:
            odd = {name: good[name][:, : least // 2] for name in ("k", "v")}
            yield "pages that are too small", "k", {**good, **odd}
