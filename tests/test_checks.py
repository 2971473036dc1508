"""Offsets, lengths and tables that lie: what is said of them with $FA3GEN_CHECK set, and on the CPU model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from packed_modules import PackedModules, offsets, packed_tensors
from stand_ins import pass_for_cuda, standing_in

import fa3gen
from fa3gen import flash_attn_interface as fa3
from fa3gen.base.errors import Caution
from fa3gen.base.switches import turned_on
from fa3gen.run import checks
from fa3gen.run.dispatch import ArgumentError
from fa3gen.run.kv_cache import KvCache


def words(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


Q, K = torch.empty(10, 4, 64), torch.empty(20, 2, 64)  # in three sequences of 3, 0 and 7, and of 5, 9 and 6 rows
GOOD: dict[str, Any] = {"cu_seqlens_q": words(0, 3, 3, 10), "cu_seqlens_k": words(0, 5, 14, 20)}

PACKED: dict[str, tuple[dict[str, Any], str]] = {
    "decreasing": ({"cu_seqlens_q": words(0, 7, 4, 10)}, r"cu_seqlens_q[2] = 4 is less than cu_seqlens_q[1] = 7"),
    "negative": ({"cu_seqlens_k": words(-2, 5, 14, 20)}, "sequence 0 has rows -2 to 4 of k, which has 20"),
    "behind the end": ({"cu_seqlens_k": words(0, 5, 14, 25)}, "sequence 2 has rows 14 to 24 of k, which has 20"),
    "more in use": ({"seqused_k": words(5, 10, 6)}, "seqused_k[1] = 10, and sequence 1 has 9 rows of k"),
    "fewer than none": ({"seqused_q": words(-1, 0, 7)}, "seqused_q[0] = -1, and sequence 0 has 3 rows of q"),
    "in use behind the end": (
        {"cu_seqlens_q": words(0, 3, 8, 20), "seqused_q": words(3, 5, 9)},
        "sequence 2 has rows 8 to 16 of q, which has 10",
    ),
    "longer": ({"longest": (6, 20)}, "sequence 2 has 7 rows of q, and max_seqlen_q is 6"),
    "longer in use": ({"seqused_k": words(5, 9, 2), "longest": (7, 8)}, "has 9 rows of k, and max_seqlen_k is 8"),
}


@pytest.mark.parametrize("fault", list(PACKED))
def test_packed_sequences(fault: str) -> None:
    changes, message = PACKED[fault]
    with pytest.raises(ArgumentError, match="^offsets, lengths or tables lie") as error:
        checks.check_sequences(Q, K, **{**GOOD, **changes})
    assert message in str(error.value) and len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"seqused_q": words(3, 0, 7), "seqused_k": words(0, 9, 5), "longest": (7, 9)},
        {"seqused_k": words(5, 9, 2), "cu_seqlens_k": words(0, 5, 14, 40)},  # ends where none are in use
        {"longest": (torch.tensor(1), None)},  # on a GPU, where nobody looks
        {"cu_seqlens_q": words(), "cu_seqlens_k": words(0)},
        {"cu_seqlens_q": None, "seqused_q": words(3), "seqused_k": torch.empty(2, 2, 2)},  # what a module refuses
        {"cu_seqlens_q": words(4, 4, 4, 4), "cu_seqlens_k": words(30, 30, 30, 30)},  # of no rows
    ],
)
def test_what_does_not_lie(given: Any) -> None:
    checks.check_sequences(Q, K, **{**GOOD, **given})


def test_no_more_than_the_first_faults_are_named() -> None:
    begins = torch.arange(30, dtype=torch.int32).flip(0) % 10
    with pytest.raises(ArgumentError) as error:
        checks.check_sequences(Q, K, begins, cu_seqlens_k=words(0))
    _, *lines, last = str(error.value).splitlines()
    assert len(lines) == checks.SHOWN and last == f"  and {27 - checks.SHOWN} more"


PAGES = torch.empty(6, 4, 2, 64)
TABLE = torch.tensor([[0, 5, -1], [3, 9, 9]], dtype=torch.int32)


def test_pages() -> None:
    """Entries that no length reaches may hold anything."""
    begins, good = words(0, 3, 10), words(8, 4)
    checks.check_sequences(Q, PAGES, begins, page_table=TABLE, seqused_k=good, longest=(7, 8))
    for changes, message in (
        ({"seqused_k": words(9, 4)}, "page_table[0, 2] = -1, and there are 6 pages; sequence 0 with its 9 keys uses 3"),
        ({"seqused_k": words(8, 5)}, "page_table[1, 1] = 9, and there are 6 pages; sequence 1 with its 5 keys uses 2"),
        ({"seqused_k": words(8, -4)}, "seqused_k[1] = -4; page_table has 3 pages of 4, room for 12 keys"),
        (
            {"seqused_k": words(13, 4), "page_table": TABLE.clamp(0, 5)},
            "seqused_k[0] = 13; page_table has 3 pages of 4, room for 12 keys",
        ),
        ({"longest": (7, 6)}, "sequence 0 has 8 keys, and max_seqlen_k is 6"),
        ({"longest": (6, 8)}, "sequence 1 has 7 rows of q, and max_seqlen_q is 6"),
        ({"seqused_q": words(4, 2)}, "seqused_q[0] = 4, and sequence 0 has 3 rows of q"),
    ):
        given: dict[str, Any] = {"page_table": TABLE, "seqused_k": good, **changes}
        with pytest.raises(ArgumentError) as error:
            checks.check_sequences(Q, PAGES, begins, **given)
        assert str(error.value).splitlines()[1:] == [f"  {message}"]


# Who asks for it


@pytest.mark.parametrize("chosen", [checks.CHECK_VARIABLE, fa3.RENDER_VARIABLE])
def test_what_is_asked_for_in_the_environment_is_read_at_import(chosen: str) -> None:
    """And that of FA3's functions, each by a name of its own."""
    others = {name: "0" for name in (checks.CHECK_VARIABLE, fa3.RENDER_VARIABLE)}
    code = """
from fa3gen import flash_attn_interface
from fa3gen.run import checks

print(checks.CHECKING, flash_attn_interface.RENDER)
"""
    environment = {**os.environ, **others, chosen: "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(variable == chosen) for variable in others]


@pytest.mark.parametrize(("value", "asked"), [(None, False), ("", False), ("0", False), ("1", True), ("yes", True)])
def test_empty_and_0_ask_for_nothing(value: str | None, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv(checks.CHECK_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(checks.CHECK_VARIABLE, value)
    assert turned_on(checks.CHECK_VARIABLE) == asked


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[PackedModules]:
    with standing_in(PackedModules(), monkeypatch) as stand_in:
        yield stand_in


def lying() -> tuple[torch.Tensor, ...]:
    q, k, v, begins_q, _ = packed_tensors([3, 5], [4, 9])
    return q, k, v, begins_q, words(0, 4, 14)


@pytest.mark.parametrize("eager", [True, False])
def test_calls_are_checked_where_it_is_set(
    eager: bool, modules: PackedModules, monkeypatch: pytest.MonkeyPatch
) -> None:
    if eager:
        pass_for_cuda(monkeypatch)
    fa3gen.attention_packed(*lying())
    monkeypatch.setattr(checks, "CHECKING", True)
    for tensors, given, message in (
        (lying(), {}, "sequence 1 has rows 4 to 13 of k, which has 13"),
        (packed_tensors([3, 5], [4, 9]), {"max_seqlen_q": 4}, "sequence 1 has 5 rows of q, and max_seqlen_q is 4"),
        (packed_tensors([3, 5], [4, 9]), {"seqused_k": words(5, 9)}, r"seqused_k\[0\] = 5, and sequence 0 has 4 rows"),
    ):
        with pytest.raises(ArgumentError, match=message):
            fa3gen.attention_packed(*tensors, **given)
    assert len(modules.calls) == 1
    fa3gen.attention_packed(*packed_tensors([3, 5], [4, 9]), max_seqlen_q=5, max_seqlen_k=9, seqused_k=words(4, 8))
    assert len(modules.calls) == 2


def test_compiled_calls_are_checked_when_they_run(modules: PackedModules, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CHECKING", True)
    compiled = torch.compile(fa3gen.attention_packed, fullgraph=True, backend="aot_eager")
    compiled(*packed_tensors([3, 5], [4, 9]))
    with pytest.raises(ArgumentError, match="sequence 1 has rows 4 to 13 of k"):
        compiled(*lying())


def test_captured_calls_are_not_checked_and_a_caution_says_so(
    modules: PackedModules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "CHECKING", True)
    pass_for_cuda(monkeypatch, capturing=True)
    with pytest.warns(Caution, match=r"\$FA3GEN_CHECK is set, but nothing can be read while a CUDA graph is captured"):
        fa3gen.attention_packed(*lying())
    assert len(modules.calls) == 1


def test_caches_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CHECKING", True)
    k = torch.zeros(6, 4, 2, 8)
    new, table = torch.zeros(2, 3, 2, 8), TABLE.clamp(0, 5)
    for table_given, chosen, message in (
        (None, words(1, 6), r"cache_batch_idx\[1\] = 6, and there are 6 sequences in k_cache"),
        (table, words(-1, 1), r"cache_batch_idx\[0\] = -1, and there are 2 rows of page_table"),
    ):
        with pytest.raises(ArgumentError, match=message):
            KvCache.of(k, k, table_given, chosen)
    cache = KvCache.of(k, k, table, None)
    cache.append(new, new, words(0, 9))
    cache.append(new[0], new[0], words(12, 9), offsets([0, 3]))
    for lengths, begins, message in (
        (words(0, 10), None, r"cache_seqlens\[1\] = 10, with 3 new keys behind; the cache has room for 12"),
        (words(-1, 0), None, r"cache_seqlens\[0\] = -1, with 3 new keys behind; the cache has room for 12"),
        (words(0, 0), words(0, 2, 4), "sequence 1 has rows 2 to 3 of k_new, which has 3"),
    ):
        rows = new if begins is None else new[0]
        with pytest.raises(ArgumentError, match=message):
            cache.append(rows, rows, lengths, begins)
    with pytest.raises(ArgumentError, match=r"page_table\[0, 2\] = -1"):
        KvCache.of(k, k, TABLE, None).as_pages(words(9, 4), words(1, 0))


def test_the_cpu_model_checks_without_being_asked() -> None:
    module = fa3gen.load("fwd_packed_d64", on="cpu")
    q, k, v, begins_q, begins_k = packed_tensors([3, 5], [4, 9], heads=(1, 1))
    for given, message in (
        ({"cu_seqlens_k": words(0, 4, 14)}, "sequence 1 has rows 4 to 13 of k, which has 13"),
        ({"seqused_q": words(3, 6)}, r"seqused_q\[1\] = 6, and sequence 1 has 5 rows of q"),
    ):
        arguments: dict[str, Any] = {"cu_seqlens_q": begins_q, "cu_seqlens_k": begins_k, **given}
        with pytest.raises(ArgumentError, match=message):
            module.attention(q, k, v, **arguments)
    module.cpu.settings.lengths_may_lie = True
    clamped = module.attention(q, k, v, begins_q, words(0, 4, 14))
    module.cpu.settings.lengths_may_lie = False
    assert clamped.equal(module.attention(q, k, v, begins_q, begins_k))
