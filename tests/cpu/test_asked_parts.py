"""Parts that calls ask for, on the CPU model: the same results, as many parts as there can be, and none empty."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hosting import module
from packed_modules import offsets, packed_attention, packed_tensors
from rendering import variants

from fa3gen.cpu.kernel import Settings
from fa3gen.design.family import PackedShape, Shape
from fa3gen.design.masks import reach
from fa3gen.design.splits import num_parts, num_shares, parts_asked
from fa3gen.run import parts
from fa3gen.run.dispatch import mask_of
from fa3gen.run.parts import in_parts, with_names
from fa3gen.verify import reference

torch.set_num_threads(1)  # the workers of xdist share the cores
ASKED, SHARES = (1, 2, 3, 7, 50), (1, 2, 3, 7)
DENSE = "fwd_decode_d64", "fwd_decode_d64_causal", "fwd_decode_pairs_d128_causal", "fwd_decode_d256"
PACKED = "fwd_packed_decode_d128_causal", "fwd_paged_decode_d64", "fwd_packed_decode_sink_causal"
SHARING = "fwd_packed_decode_shared_d64_causal"  # two CTAs have an SM
WINDOW = "fwd_packed_decode_any_window_d64"
ROUNDED = {"rtol": 2**-8, "atol": 2**-8}  # O and P are rounded to bfloat16, P relative to the maxima of its part


def dense(dim: int, seq_q: int = 3, seq_k: int = 6 * 64 + 1, batch: int = 2) -> tuple[torch.Tensor, ...]:
    """Sequences, five query heads for one of k; the last tile of 64 keys has one."""
    generator = torch.Generator().manual_seed(dim)
    shapes = (batch, seq_q, 5, dim), (batch, seq_k, 1, dim), (batch, seq_k, 1, dim)
    return tuple(torch.randn(shape, generator=generator).bfloat16() for shape in shapes)


class Watched:
    """The module of a stem, on so many SMs, that keeps the shape of the parts of each launch."""

    def __init__(self, stem: str, sms: int = 3) -> None:
        self.spec, self.found, self.parts = variants()[stem].spec, module(stem), list[tuple[int, ...]]()
        self.found.cpu.settings = Settings(sms=sms)
        names = list(self.found.cpu.names)
        place = names.index("workspace" if "workspace" in names else "parts")
        launch = self.found.compile_for_sm90a()

        def compile_for_sm90a() -> Any:
            def watched(*arguments: Any) -> None:
                self.parts.append(tuple(arguments[place].shape))
                launch(*arguments)

            return watched

        attention = with_names(self.found.attention, compile_for_sm90a=compile_for_sm90a)
        self.entry: Any = type(self.found)(stem)
        vars(self.entry).update(vars(self.found), attention=attention)

    def __call__(self, asked: int, *tensors: Any, **options: Any) -> Any:
        return in_parts(self.entry, asked)(*tensors, return_lse=True, **options)


@pytest.mark.parametrize("steps", [0, 1, 2, 7, 8, 128])
def test_no_part_is_empty(steps: int) -> None:
    for asked in (1, 2, 3, 7, 8, 100):
        parts = parts_asked(steps, asked)
        assert 1 <= parts <= max(min(asked, steps), 1)
        assert steps == 0 or (parts - 1) * -(-steps // parts) < steps <= parts * -(-steps // parts)
        assert steps % asked or parts == min(asked, max(steps, 1))


@pytest.mark.parametrize("stem", DENSE)
def test_dense_keys_in_so_many_parts(stem: str) -> None:
    """7 tiles of 64 keys, or 4 of 128: whole ones, equally many, so that 3 parts of 4 tiles are 2."""
    watched = Watched(stem)
    given = dense(watched.spec.problem.head_dim)
    mask = reach(watched.spec.mask)
    wanted = reference.attention(*given, reach=mask, compute_dtype=torch.float32)
    for asked in ASKED:
        out, lse = watched(asked, *given)
        torch.testing.assert_close(out.float(), wanted.out.float(), **ROUNDED)
        torch.testing.assert_close(lse, wanted.lse.float(), rtol=1e-5, atol=1e-4)
    used = [max(shape[0], 1) for shape in watched.parts]
    shape = Shape(2, 3, 6 * 64 + 1, 5, 1)
    assert used == [num_parts(watched.spec, shape, 3, asked) for asked in ASKED]
    assert used == ([1, 2, 3, 7, 7] if watched.spec.tile.kv == 64 else [1, 2, 2, 4, 4])


def test_many_queries_and_rows_without_a_key() -> None:
    """More queries than a tile holds, of which the first see nothing: parts of nothing are added up to nothing."""
    watched = Watched("fwd_decode_d64_causal")
    given = dense(64, seq_q=150, seq_k=129, batch=1)
    wanted = reference.attention(*given, reach=(None, 0), compute_dtype=torch.float32)
    out, lse = watched(7, *given)
    assert watched.parts[0][0] == num_parts(watched.spec, Shape(1, 150, 129, 5, 1), 3, 7) == 3
    torch.testing.assert_close(out.float(), wanted.out.float(), **ROUNDED)
    torch.testing.assert_close(lse, wanted.lse.float(), rtol=1e-5, atol=1e-4)
    assert (out[:, :21] == 0).all() and (lse[:, :, :21] == -torch.inf).all()


def test_other_calls_are_divided_as_ever() -> None:
    """The module's own entry point goes by SMs, before and after."""
    found, given = module("fwd_decode_d64"), dense(64)
    found.cpu.settings = Settings(sms=3)
    before = found.attention(*given, return_lse=True)
    in_parts(found, 7)(*given)
    after = found.attention(*given, return_lse=True)
    assert all(one.equal(other) for one, other in zip(before, after, strict=True))


LENGTHS = [1, 0, 3, 9], [400, 90, 0, 233]


@pytest.mark.parametrize("stem", [*PACKED, SHARING, WINDOW])
def test_packed_keys_in_so_many_shares(stem: str) -> None:
    """As many CTAs as tiles of queries of sequences of the mean length, times that; also more of them than steps."""
    watched = Watched(stem)
    spec, dim = watched.spec, watched.spec.problem.head_dim
    window = (200, 0) if stem == WINDOW else None
    options: dict[str, Any] = {"window": window} if window else {}
    options |= {"sinks": torch.linspace(-1, 1, 6)} if spec.softmax.sink else {}
    q, k, v, begins_q, begins_k = packed_tensors(*LENGTHS, heads=(6, 2), head_dim=dim)
    mask = mask_of(False, window) if window else spec.mask
    scores = {name: options[name] for name in ("sinks",) if name in options}
    wanted, wanted_lse = packed_attention(q, k, v, begins_q, begins_k, mask=mask, **scores)
    keys: tuple[Any, ...] = k, v, begins_q, begins_k
    if spec.problem.layout == "paged":
        keys = *in_pages(k, v, LENGTHS[1]), begins_q, *table_of(LENGTHS[1])
    for asked in SHARES:
        out, lse = watched(asked, q, keys[0], keys[1], *keys[2:], **options)
        torch.testing.assert_close(out.float(), wanted, **ROUNDED)
        torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-4)
    shape = PackedShape(tuple(LENGTHS[0]), tuple(LENGTHS[1]), 6, 2)
    used = [parts[0] for parts in watched.parts]
    assert used == [num_shares(spec, shape, 3, asked) for asked in SHARES] == [8 * asked for asked in SHARES]


def test_heads_in_packs_have_as_many_shares_as_their_tiles() -> None:
    """Of 12 heads three packs of 4, in tiles of 32 queries: six tiles where all heads together would take eight."""
    watched = Watched("fwd_packed_chunks_d64_causal")
    q, k, v, *begins = packed_tensors([64], [200], heads=(12, 1), head_dim=64)
    wanted, wanted_lse = packed_attention(q, k, v, *begins, mask=watched.spec.mask)
    out, lse = watched(2, q, k, v, *begins)
    torch.testing.assert_close(out.float(), wanted, **ROUNDED)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-4)
    [left] = watched.parts
    assert left[0] == num_shares(watched.spec, PackedShape((64,), (200,), 12, 1), 3, 2) == 2 * 6


PAGE = 64


def in_pages(k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence in pages of its own, one behind the other."""
    pages = [-(-length // PAGE) for length in lengths]
    found = []
    for x in (k, v):
        rows = x.new_zeros(sum(pages) * PAGE, *x.shape[1:])
        for begin, page, length in zip(
            offsets(lengths).tolist(), itertools.accumulate([0, *pages]), lengths, strict=False
        ):
            rows[page * PAGE : page * PAGE + length] = x[begin : begin + length]
        found.append(rows.unflatten(0, (-1, PAGE)))
    return found[0], found[1]


def table_of(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Their table, and how many keys each has."""
    pages = [-(-length // PAGE) for length in lengths]
    firsts = torch.tensor([0, *pages[:-1]]).cumsum(0)
    return (firsts[:, None] + torch.arange(max(pages))).int(), torch.tensor(lengths, dtype=torch.int32)


# More than there is room for


def test_as_many_parts_as_32_bits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 7 as many as leave so many elements; one always."""
    watched, given = Watched("fwd_decode_d64"), dense(64)
    wanted = reference.attention(*given, reach=(None, None), compute_dtype=torch.float32)
    elements = given[0].numel()
    for room in (4 * elements - 1, elements - 1):
        monkeypatch.setattr(parts, "MOST_ELEMENTS", room)
        out, _ = watched(7, *given)
        torch.testing.assert_close(out.float(), wanted.out.float(), **ROUNDED)
    assert [max(shape[0], 1) for shape in watched.parts] == [3, 1]
    assert parts.counted(2**30) == 1 and parts.counted(0) > 1


def test_as_many_parts_as_a_grid_has_places_for() -> None:
    watched, given = Watched("fwd_decode_d64"), dense(64, seq_q=9)  # three tiles of four queries
    watched.entry.GRID_MAX = 3 * 3 - 1
    watched(7, *given)
    assert watched.parts[0][0] == 2


def test_as_many_shares_as_32_bits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CTA leaves `CTA_WORDS`; where two share an SM there is memory for both."""
    q, k, v, *begins = packed_tensors(*LENGTHS, heads=(6, 2), head_dim=64)
    for stem, left in (("fwd_packed_decode_d64_causal", 3), (SHARING, 2)):
        watched = Watched(stem)
        monkeypatch.setattr(parts, "MOST_ELEMENTS", 4 * watched.found.CTA_WORDS - 1)
        out, _ = watched(7, q, k, v, *begins)
        wanted, _ = packed_attention(q, k, v, *begins, mask=watched.spec.mask)
        torch.testing.assert_close(out.float(), wanted.float(), **ROUNDED)
        assert watched.parts[0][0] == left
