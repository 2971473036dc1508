"""Packed sequences and pages on the CPU model: parts of so many keys leave the same bits whoever adds them up.

A CTA may have a part, and a second kernel adds parts up (`split: {keys: N}`, scheduler even), or a CTA has all keys of
its queries and adds up parts as it goes (`softmax.restart_every: N`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hosting import mistaken, module, path_of
from rendering import CHECKOUT, changed, source, variants
from test_bits_of_rows import Request, call, chunk, request, rows, same

from fa3gen.cpu.kernel import Settings
from fa3gen.cpu.module import load_on_cpu
from fa3gen.generate.render import render_variant
from fa3gen.verify.on_cpu import verify_on_cpu
from fa3gen.verify.packed_inputs import sequences

torch.set_num_threads(1)  # the workers of xdist share the cores

# By one, and by many: few queries, parts of CTAs; many queries, parts of one CTA.
PAIRS = [
    (f"fwd_{layout}_decode_fixed_{rest}", f"fwd_{layout}_fixed_{rest}")
    for layout, rest in (
        *(("packed", "d64"), ("packed", "d64_causal"), ("packed", "d128_causal")),
        *(("paged", "d64_causal"), ("paged", "d128"), ("paged", "d128_causal")),
    )
]
CHUNKED = [PAIRS[2], PAIRS[3]]
HEADS = (4, 2)


def requests_of(stem: str) -> list[Request]:
    """One key; less than a part; parts that end where keys do, and one key behind; several, with some queries."""
    spec = variants()[stem].spec
    assert spec.split is not None and spec.split.keys is not None
    part = spec.split.keys
    lengths = (1, 1), (1, part - 1), (2, part), (1, part + 1), (5, 2 * part + 70), (3, 2)
    return [request(stem, HEADS, *each, seed=i) for i, each in enumerate(lengths)]


@pytest.mark.parametrize(("few", "many"), PAIRS)
def test_both_kinds_give_the_same_bits(few: str, many: str) -> None:
    requests = requests_of(few)
    by_parts, by_one = call(few, requests), call(many, requests)
    assert all(same(one, other) for one, other in zip(by_parts, by_one, strict=True))
    assert all(out.isfinite().all() for out, _ in by_parts)
    alone = requests[4:5]  # and on another number of SMs
    assert same(call(few, alone, 7)[0], by_one[4]) and same(call(many, alone, 1)[0], by_one[4])
    order = (4, 0, 4, 3)
    for i, found in zip(order, call(few, [requests[i] for i in order], 5), strict=True):
        assert same(found, by_one[i])


def test_parts_of_capped_scores(tmp_path: Path) -> None:
    """No committed module has them. Maxima that are added up are of what is left of a score, and so is their factor."""
    capped = changed(PAIRS[1][0], softmax={"softcap": True})
    found = load_on_cpu(path_of(tmp_path, "capped", render_variant(capped, CHECKOUT)))
    case = sequences("parts", "several parts, and less than one", (2, 1), (3 * 512 + 5, 70), heads=HEADS, softcap=5.0)
    assert verify_on_cpu(found, capped.spec, stem="capped", cases=[case], count=1, calls=False).failures == ()


@pytest.mark.parametrize(("few", "many"), CHUNKED)
def test_chunks_of_a_prompt_have_its_bits(few: str, many: str) -> None:
    """Rows lie elsewhere in their tile, whose keys end elsewhere, and steps of decoding are rows of the prompt."""
    spec = variants()[few].spec
    assert spec.split is not None and spec.split.keys is not None
    part = spec.split.keys
    whole, beside = request(few, HEADS, 140, part + 150, seed=3), request(few, HEADS, 2, 300, seed=4)
    [prompt] = call(many, [whole])
    begin = 0
    for number, end in enumerate((1, 2, 7, 129, 131, 140)):
        stem = few if end - begin < 8 else many
        *_, found = call(stem, [*[beside] * (number % 3), chunk(whole, begin, end)], 1 + number)
        assert same(found, rows(prompt, begin, end))
        begin = end


@pytest.mark.parametrize("queries", [1, 7])
def test_memory_for_parts_is_made_for_the_longest_sequence_that_is_said(queries: int) -> None:
    """With max_seqlen_k there is less of it, and the bits are the same."""
    few = "fwd_packed_decode_fixed_d64_causal"
    requests = [request(few, HEADS, queries, keys, seed=keys) for keys in (600, 20, 513)]
    made: list[tuple[int, ...]] = []
    entry, empty = module(few), module(few).empty
    entry.empty = lambda shape, *others: made.append(tuple(shape)) or empty(shape, *others)
    try:
        free = call(few, requests)
        told = call(few, requests, max_seqlen_k=600)
    finally:
        entry.empty = empty
    assert all(same(one, other) for one, other in zip(free, told, strict=True))
    rows = 3 * queries
    assert [shape for shape in made if len(shape) == 4] == [(3, rows, 4, 64), (2, rows, 4, 64)]
    assert (2, 4, rows) in made


def test_keys_behind_the_longest_that_is_said_are_not_seen() -> None:
    """Whoever says too little writes outside of nothing: parts that there is no memory for do not exist."""
    few = "fwd_packed_decode_fixed_d64"
    q, k, v = request(few, HEADS, 2, 1200, seed=1)
    [lied] = call(few, [(q, k, v)], max_seqlen_k=512)
    [cut] = call(few, [(q, k[:512], v[:512])])
    assert same(lied, cut)


# Mistakes


def test_parts_added_up_in_another_order_are_noticed(tmp_path: Path) -> None:
    """Which leaves results right: the first part first, as if parts were taken as they arrive."""
    few, many = PAIRS[0]
    text = source(few)
    wrong = text.replace("for last in cutlass.range(num_parts - 1, -1, -WARP", "for last in cutlass.range(0, 1")
    for old, new in (
        ("lane <= last:", "lane < num_parts:"),
        ("gMax[last - lane], gSum[last - lane]", "gMax[lane], gSum[lane]"),
        ("if i <= last:", "if i < num_parts:"),
        ("gO[None, last - i]", "gO[None, i]"),
    ):
        assert old in wrong
        wrong = wrong.replace(old, new)
    found = load_on_cpu(path_of(tmp_path, "wrong", wrong))
    case = sequences("parts", "a sequence of four parts", (2,), (1700,), heads=HEADS)
    assert not verify_on_cpu(found, variants()[few].spec, stem="wrong", cases=[case], count=1, calls=False).failures
    q, k, v = request(few, HEADS, 16, 1700, seed=1)
    one = [(q / 16, k, v)]  # so that all parts weigh about the same
    assert same(call(few, one)[0], call(many, one)[0])
    assert not same(call(few, one, loaded=found)[0], call(many, one)[0])


MISTAKES = {
    "parts are read before they are written": ("few", "    cute.arch.griddepcontrol_wait()\n", ""),
    "a part is left to nobody": ("few", "num_parts - 1, -1, -WARP", "num_parts - 2, -1, -WARP"),
    "O goes on where a part begins": ("many", "        acc_O.fill(0.0)\n    else:", "    else:"),
    "O is added before it is complete": (
        "many",
        "    warpgroup.wait_group(0)  # O is added or rescaled and P overwritten next: no group stays in flight\n",
        "",
    ),
    "the last part is forgotten": (
        "many",
        "        fold_part((sO_before, all_max, all_sum), (acc_O, row_max, row_sum), n_end <= STEPS_OF_PART,",
        "        (lambda *_: None)(sO_before, n_end,",
    ),
    "parts before the last one are forgotten": ("many", "n_end <= STEPS_OF_PART, scale_log2", "True, scale_log2"),
    "sums are read that nobody has written": (
        "many",
        "first = n_block + 1 + STEPS_OF_PART >= n_end",
        "first = n_end < 0",
    ),
    "sums of the parts before are kept nowhere": (
        "many",
        "        cute.autovec_copy(by_vectors(acc_O), sO_before)\n",
        "",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_reported(tmp_path: Path, mistake: str) -> None:
    kind, old, new = MISTAKES[mistake]
    stem = PAIRS[0][kind == "many"]
    text = source(stem)
    assert text.count(old) == 1
    found = mistaken(tmp_path, "wrong", text.replace(old, new))
    found.cpu.settings = Settings(sms=3)
    case = sequences("parts", "a sequence of three parts", (2,), (1200,), heads=HEADS)
    assert verify_on_cpu(
        found, variants()[stem].spec, stem="wrong", cases=[case], seed=1, count=1, calls=False
    ).failures


def test_parts_that_begin_elsewhere_are_noticed(tmp_path: Path) -> None:
    """Another mistake that leaves results right: parts that begin a tile of keys later."""
    few, many = PAIRS[0]
    text, old = source(many), "begins = (n_block + 1) % STEPS_OF_PART == 0"
    assert text.count(old) == 1
    found = load_on_cpu(path_of(tmp_path, "wrong", text.replace(old, "begins = n_block % STEPS_OF_PART == 0")))
    case = sequences("parts", "a sequence of three parts", (2,), (1200,), heads=HEADS)
    assert not verify_on_cpu(found, variants()[many].spec, stem="wrong", cases=[case], count=1, calls=False).failures
    one = [request(few, HEADS, 3, 1200, seed=1)]
    assert not same(call(few, one)[0], call(many, one, loaded=found)[0])
