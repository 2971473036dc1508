"""Pictures of what the plan decides: shared memory, swizzles, register fragments, tiles of queries and keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from fa3gen.cpu.places import SharedPlace, SharedPlaces
from fa3gen.design import footprint, gemm, tile_order
from fa3gen.design.family import PackedShape, Shape
from fa3gen.hardware import hopper
from fa3gen.inspect.report import fragments, swizzles, tiles
from fa3gen.inspect.report.drawing import COLOURS, Svg
from fa3gen.spec.model import Forward, Gemm

WIDE = 960

# -- shared memory


def shared_memory(spec: Forward) -> Markup:
    """All bytes that a CTA may have, and below them the mbarriers one by one."""
    places = SharedPlaces.of(spec)
    total = footprint.total_bytes(footprint.shared_memory_map(spec), footprint.barrier_bytes(spec))
    has_barriers = bool(places.barriers)
    picture = Svg(WIDE, 176 if has_barriers else 92, "Map of shared memory")
    scale = WIDE / hopper.SMEM_PER_CTA
    names = list(dict.fromkeys(place.name for place in places.arrays))
    picture.rect(0, 22, WIDE, 44, "free", f"{hopper.SMEM_PER_CTA - total:,} bytes are left of {hopper.SMEM_PER_CTA:,}")
    for place in places.arrays:
        x, width = place.offset * scale, place.bytes * scale
        title = f"{place.label}: bytes {place.offset:,} to {place.offset + place.bytes - 1:,} ({place.bytes:,} bytes)"
        picture.rect(x, 22, max(width, 1), 44, f"cell c{names.index(place.name) % COLOURS}", title)
        if width > 9 * len(place.label):
            picture.text(x + width / 2, 49, place.label, "on", "middle")
        elif width > 14:
            picture.text(x + width / 2, 49, str(place.stage), "on", "middle")
    used = total * scale
    picture.line(used, 14, used, 66, "mark")
    anchor = "end" if used > WIDE / 2 else "start"
    picture.text(used + (-5 if anchor == "end" else 5), 12, f"{total:,} bytes asked for", "small", anchor)
    picture.text(0, 84, "0", "small")
    picture.text(WIDE, 84, f"{hopper.SMEM_PER_CTA:,}", "small", "end")
    if has_barriers:
        _barriers(picture, places, scale)
    return picture.markup("wide")


def _barriers(picture: Svg, places: SharedPlaces, scale: float) -> None:
    first, last = places.barriers[0], places.barriers[-1]
    end = last.offset + last.bytes
    top, height = 118, 30
    cell = min(64, WIDE / len(places.barriers))
    picture.path([(first.offset * scale, 66), (0, top)], "guide")
    picture.path([(end * scale, 66), (cell * len(places.barriers), top)], "guide")
    rings = list(dict.fromkeys(place.name for place in places.barriers))
    for index, place in enumerate(places.barriers):
        title = f"{place.barrier_label}: bytes {place.offset:,} to {place.offset + place.bytes - 1:,}, an mbarrier"
        picture.rect(index * cell, top, cell, height, f"cell c{rings.index(place.name) % COLOURS}", title)
        if place.stage is not None:
            picture.text((index + 0.5) * cell, top + 20, str(place.stage), "on", "middle")
    for name in rings:
        indices = [index for index, place in enumerate(places.barriers) if place.name == name]
        middle = (indices[0] + indices[-1] + 1) / 2 * cell
        short = name if len(name) * 7.2 < len(indices) * cell + 6 else name.replace("_full", "+").replace("_empty", "−")
        picture.text(middle, top + height + 16, short, "small", "middle")


@dataclass(frozen=True)
class MapRow:
    """One line of the table below the map."""

    colour: int
    place: SharedPlace
    end: int


def memory_rows(spec: Forward) -> tuple[MapRow, ...]:
    """Every stage of every array, in order; mbarriers stand in the picture and in their own table."""
    places = SharedPlaces.of(spec)
    names = list(dict.fromkeys(place.name for place in places.arrays))
    return tuple(
        MapRow(names.index(place.name) % COLOURS, place, place.offset + place.bytes - 1) for place in places.arrays
    )


# -- swizzles


def banks(operand: swizzles.Operand, *, plain: bool) -> Svg:
    """Eight rows of a tile as they lie in the banks: a line for every 128 bytes, a column for every four banks."""
    how = "without the swizzle" if plain else "as laid out"
    chunks = swizzles.pattern(operand, plain=plain)
    return bank_picture(chunks, f"Bank groups of {operand.what}, {how}", operand.row)


def bank_picture(chunks: Sequence[swizzles.Chunk], name: str, row: str) -> Svg:
    """Chunks of eight rows where they lie in the banks; `row` says what a row is."""
    span = (max(chunk.chunk for chunk in chunks) + 1) * swizzles.CHUNK
    cell, left, top = 44, 44, 34
    lines = max(chunk.line for chunk in chunks) + 1
    height = 26 if lines > 2 else 32
    picture = Svg(left + 8 * cell + 2, top + lines * height + 4, name)
    for group in range(swizzles.GROUPS):
        x = left + (group + 0.5) * cell
        picture.text(x, 14, f"{4 * group}–{4 * group + 3}", "small", "middle")
    picture.text(0, 14, "banks", "small")
    picture.line(left, 22, left + 8 * cell, 22, "axis")
    for line in range(lines):
        picture.text(left - 8, top + (line + 0.5) * height + 4, f"{line * swizzles.LINE}", "small", "end")
    for chunk in chunks:
        x, y = left + chunk.group * cell, top + chunk.line * height
        title = (
            f"{row} {chunk.row}, bytes {chunk.chunk * 16} to {chunk.chunk * 16 + 15} of its {span}: "
            f"byte {chunk.address} of the tile, banks {4 * chunk.group} to {4 * chunk.group + 3}"
        )
        picked = " picked" if chunk.chunk == 0 else ""
        picture.rect(x + 1, y + 1, cell - 2, height - 2, f"cell c{chunk.chunk}{picked}", title, 3)
        picture.text(x + cell / 2, y + height / 2 + 4.5, f"{chunk.row}.{chunk.chunk}", "on", "middle")
    return picture


@dataclass(frozen=True)
class SwizzleView:
    """Operands whose patterns are the same, the pictures, and what accesses cost."""

    operands: tuple[swizzles.Operand, ...]
    laid_out: Markup
    plain: Markup | None
    accesses: tuple[swizzles.Access, ...]


def swizzle_views(spec: Forward) -> tuple[SwizzleView, ...]:
    """One view for each pattern among the operand tiles."""
    groups: dict[tuple[str, int], list[swizzles.Operand]] = {}
    for operand in swizzles.operands(spec):
        groups.setdefault((operand.swizzle, operand.span), []).append(operand)
    views = []
    for (swizzle, _), members in groups.items():
        one = members[0]
        plain = None if swizzle == "none" else banks(one, plain=True).markup()
        found = dict.fromkeys(access for operand in members for access in swizzles.accesses(operand))
        views.append(SwizzleView(tuple(members), banks(one, plain=False).markup(), plain, tuple(found)))
    return tuple(views)


# -- fragments

ROW, PAIR = 11, 22
LEFT, TOP = 34, 18  # of the first cell


def owners(fragment: fragments.Fragment) -> Svg:
    """64 rows and all columns, coloured by thread of the quad and row within eight.

    One block of eight columns, or 16, is drawn and repeated.
    """
    blocks, cell = fragment.columns // fragment.block, fragment.run * PAIR // 2
    width = 4 * cell
    picture = Svg(LEFT + blocks * width + 1, TOP + 64 * ROW + 1, fragment.what)
    name = f"block-{fragment.key}"
    cells = []
    for row in range(64):
        for run in range(4):
            place = fragment.place(row, fragment.run * run)
            shade = place.lane % 4 + 4 * (place.lane // 4 % 2)
            box = f'x="{run * cell}" y="{row * ROW}" width="{cell}" height="{ROW}"'
            cells.append(f'<rect class="cell c{shade}" {box}/>')
            middle = run * cell + cell // 2
            cells.append(f'<text class="owner" x="{middle}" y="{row * ROW + 8.5}">{place.thread}</text>')
    picture.raw(Markup(f'<defs><g id="{escape(name)}">{"".join(cells)}</g></defs>'))
    for block in range(blocks):
        x = LEFT + block * width
        picture.raw(Markup(f'<use href="#{escape(name)}" x="{x}" y="{TOP}"/>'))
        columns = f"{fragment.block * block}–{fragment.block * (block + 1) - 1}"
        picture.text(x + width / 2, 12, columns, "small", "middle")
        if block:
            picture.line(x, TOP, x, TOP + 64 * ROW, "axis")
    for row in range(0, 64, 8):
        picture.text(LEFT - 6, TOP + row * ROW + 9, str(row), "small", "end")
        if row % 16 == 0:
            picture.line(LEFT, TOP + row * ROW, LEFT + blocks * width, TOP + row * ROW, "strong")
    return picture


def fragment(fragment: fragments.Fragment) -> Markup:
    """The picture of its owners for the page, whose script reads who they are in one block from `data-fragment`."""
    picture = owners(fragment)
    picture.raw(Markup('<g class="hits"></g><rect class="cursor" width="0" height="0"/>'))
    data = {
        "left": LEFT,
        "top": TOP,
        "row": ROW,
        "column": PAIR / 2,
        "columns": fragment.columns,
        "block": fragment.block,
        "step": fragment.place(0, fragment.block).register,
        "each": fragment.each,
        "places": [
            [
                [place.thread, place.register, -1 if place.part is None else place.part]
                for place in (fragment.place(row, column) for column in range(fragment.block))
            ]
            for row in range(64)
        ],
    }
    text = escape(json.dumps(data, separators=(",", ":")))
    return picture.markup("fixed", f'tabindex="0" data-fragment="{text}"')


# -- tiles


def tile_schedule(spec: Forward, seq_q: int, seq_k: int) -> Markup:
    """One head: a row for each tile of queries, a column for each tile of keys."""
    plan = tiles.schedule(spec, seq_q, seq_k)
    left, top = 92, 24
    cell = max(9.0, min(30.0, (WIDE - left) / plan.key_tiles))
    height = max(12.0, min(26.0, 420 / len(plan.rows)))
    width = left + plan.key_tiles * cell + 2
    picture = Svg(width, top + len(plan.rows) * height + 22, f"Tiles of {seq_q} queries and {seq_k} keys")
    picture.text(left, 14, "keys →", "small")
    picture.text(0, 14, "queries ↓", "small")
    m, n = tile_order.positions(spec), spec.tile.kv
    for index, row in enumerate(plan.rows):
        y = top + index * height
        picture.text(left - 8, y + height / 2 + 4, f"{index * m:,}–{min((index + 1) * m, seq_q) - 1:,}", "small", "end")
        visited = {block: order for order, block in enumerate(tiles.order(row), 1)}
        first, height_within = row.first_key, height - 1
        if first:
            hidden = f"keys 0 to {first - 1:,}: skipped, never loaded"
            picture.rect(left + 0.5, y + 0.5, first / n * cell - 1, height_within, "tile skipped", hidden)
        for block in range(-(-(seq_k - first) // n)):
            state = tiles.state(row, block)
            keys = f"keys {first + block * n:,} to {min(first + (block + 1) * n, seq_k) - 1:,}"
            when = f"visited {_ordinal(visited[block])} of {len(visited)}" if block in visited else "never loaded"
            where = f"queries {index * m:,} to {min((index + 1) * m, seq_q) - 1:,}, {keys}"
            x = left + (first / n + block) * cell
            picture.rect(x + 0.5, y + 0.5, cell - 1, height_within, f"tile {state}", f"{where}: {state}, {when}")
            if block in visited and cell >= 15:
                picture.text(x + cell / 2, y + height / 2 + 4, str(visited[block]), f"order {state}", "middle")
    step = max(1, -(-64 // int(cell)))
    for block in range(0, plan.key_tiles, step):
        picture.text(left + block * cell, top + len(plan.rows) * height + 15, f"{block * n:,}", "small")
    return picture.markup("wide")


def _ordinal(number: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{suffix}"


def taking_order(spec: Forward, shape: Shape | PackedShape) -> Markup:
    """The number that each tile of queries has, by head: the order in which CTAs are started with them or take them."""
    order, m = list(tile_order.taken(spec, shape)), tile_order.positions(spec)
    rows = [  # sequence, tile of queries, and its rows
        (number, block, f"{block * m:,}–{min((block + 1) * m, seq_q) - 1:,}")
        for number, (seq_q, _) in enumerate(shape.sequences)
        for block in range(-(-seq_q // m))
    ]
    heads, several = shape.heads_q // spec.tile.pack_heads, len(shape.sequences) > 1
    left, top, cell, height = 168 if several else 92, 24, 40, 22
    picture = Svg(left + heads * cell + 2, top + len(rows) * height + 4, "Order in which tiles of queries are taken")
    for head in range(heads):
        picture.text(left + (head + 0.5) * cell, 14, f"{head}", "small", "middle")
    picture.text(0, 14, "head →", "small")
    places = {}
    for index, (number, block, queries) in enumerate(rows):
        places[number, block] = top + index * height
        label = f"sequence {number}: {queries}" if several else queries
        picture.text(left - 8, top + index * height + height / 2 + 4, label, "small", "end")
    for entry in order:
        x, y = left + entry.head * cell, places[entry.batch, entry.m_block]
        shade = entry.number * COLOURS // len(order)
        where = f"sequence {entry.batch}, " * several
        title = f"number {entry.number}: {where}head {entry.head}, tile of queries {entry.m_block}"
        picture.rect(x + 1, y + 1, cell - 2, height - 2, f"cell s{shade}", title, 3)
        picture.text(x + cell / 2, y + height / 2 + 4.5, str(entry.number), "onseq", "middle")
    return picture.markup()


# -- tiles of a GEMM

ORDER_CELL = 18  # pixels of a tile of 128 rows or columns; others in proportion


def tile_order_of_gemm(spec: Gemm, size: int, sms: int) -> Svg:
    """Tiles of D (size x size) in the colour of the wave of `sms` tiles that they are computed in, were all alike."""
    m_blocks, n_blocks = -(-size // spec.tile.m), -(-size // spec.tile.n)
    height, width = ORDER_CELL * spec.tile.m / 128, ORDER_CELL * spec.tile.n / 128
    label = f"Which of the {m_blocks} x {n_blocks} tiles of D are computed at the same time on {sms} SMs"
    picture = Svg(n_blocks * width, m_blocks * height + 20, label)
    for tile in range(m_blocks * n_blocks):
        m_block, n_block = gemm.tile_coordinates(spec, tile, m_blocks, n_blocks)
        wave = tile // sms
        title = f"tile {tile}, wave {wave}: rows from {m_block * spec.tile.m}, columns from {n_block * spec.tile.n}"
        x, y = n_block * width, m_block * height
        picture.rect(x + 0.5, y + 0.5, width - 1, height - 1, f"cell c{wave % COLOURS}", title)
    said = f"{m_blocks} x {n_blocks} tiles, {sms} at a time"
    picture.text(0, m_blocks * height + 16, said, "small")
    return picture
