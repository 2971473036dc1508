"""Show what `bench` measured: one table per head dim and mask for the terminal, one figure for a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa3gen.base.errors import UserError
from fa3gen.base.files import write_text
from fa3gen.base.markdown import speed
from fa3gen.design.family import mask_label
from fa3gen.measure.bench import Bench, CellResult, Result
from fa3gen.records.evidence import TIMED

if TYPE_CHECKING:
    from rich.table import Table

PLOT_SUFFIXES = (".png", ".svg")


def panels(bench: Bench) -> Iterator[tuple[str, list[CellResult]]]:
    """Yield the cells that belong together: a title such as `bf16, head dim 128, causal`, and them by length."""
    groups: dict[str, list[CellResult]] = {}
    for entry in bench.cells:
        cell = entry.cell
        named = "".join(f", {name}" for name in cell.family.keywords)
        title = f"{cell.dtype}, head dim {cell.family.dims}, {mask_label(cell.mask)}{named}"
        groups.setdefault(title, []).append(entry)
    yield from groups.items()


def competitors(entries: Sequence[CellResult]) -> list[str]:
    """Return the names in these cells, in the order of their first appearance."""
    return list(dict.fromkeys(result.competitor for entry in entries for result in entry.results))


def _find(entry: CellResult, name: str) -> Result | None:
    return next((result for result in entry.results if result.competitor == name), None)


def length_label(seq_len: int) -> str:
    """Return `512` or `16k`."""
    return f"{seq_len // 1024}k" if seq_len % 1024 == 0 else str(seq_len)


def cell_text(result: Result | None) -> str:
    """Return a speed, or the first words of the reason, or nothing where the competitor does not serve the cell."""
    if result is None:
        return ""
    if result.reason is None:
        return speed(result.tflops)
    return result.reason.partition(":")[0] if ":" in result.reason else "n/a"


def tables(bench: Bench) -> Iterator[Table]:
    """Yield one rich table of TFLOP/s per panel; the best of each column is bold."""
    from rich.table import Table

    for title, entries in panels(bench):
        table = Table(title=f"TFLOP/s, {title}; {TIMED}", title_justify="left")
        table.add_column("kernel")
        for entry in entries:
            table.add_column(length_label(entry.cell.seq_len), justify="right")
        best = [max((r.tflops for r in entry.results if r.tflops is not None), default=None) for entry in entries]
        for name in competitors(entries):
            row = []
            for entry, top in zip(entries, best, strict=True):
                result = _find(entry, name)
                text = cell_text(result)
                row.append(
                    f"[bold]{text}[/]" if result and result.tflops is not None and result.tflops == top else text
                )
            table.add_row(name, *row)
        yield table


def launch_table(bench: Bench) -> Table:
    """Return the table of what launches cost the host: the first call of a process, and every later one."""
    from rich.table import Table

    table = Table(title="Host time of a launch", title_justify="left")
    table.add_column("kernel")
    for title in ("first call, compiled, s", "first call, cached, s", "later calls, microseconds"):
        table.add_column(title, justify="right")
    for launch in bench.launches:
        times = (launch.compiled_s, launch.cached_s, launch.host_us)
        table.add_row(launch.competitor, *("" if value is None else f"{value:.3g}" for value in times))
    return table


def reasons(bench: Bench) -> list[str]:
    """Return every reason for a missing number in full, each once, with where it applies."""
    places: dict[tuple[str, str], list[str]] = {}
    for title, entries in panels(bench):
        for entry in entries:
            for result in entry.results:
                if result.reason is not None:
                    place = f"{title}, {length_label(entry.cell.seq_len)}"
                    places.setdefault((result.competitor, result.reason), []).append(place)
    total = len(bench.cells)
    return [f"{entry.competitor}: {entry.reason} (launch times)" for entry in bench.launches if entry.reason] + [
        f"{name}: {reason}" + ("" if len(where) == total else f" ({'; '.join(where)})")
        for (name, reason), where in places.items()
    ]


def check_plot_path(path: Path) -> None:
    """Raise UserError, before anything is measured, for a suffix that cannot be plotted to."""
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise UserError(f"--plot {path}: the suffix decides the format; use {' or '.join(PLOT_SUFFIXES)}")


def plot(bench: Bench, path: Path) -> None:
    """Draw TFLOP/s over sequence length, one panel per head dim and mask, into a .png or .svg file."""
    check_plot_path(path)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    groups = list(panels(bench))
    columns = min(2, len(groups))
    rows = -(-len(groups) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(6.5 * columns, 4 * rows + 0.8), squeeze=False, sharex=True)
    names = competitors(bench.cells)
    generated = {result.competitor for entry in bench.cells for result in entry.results if result.generated}
    styles = {name: _style(number, name in generated) for number, name in enumerate(names)}
    for axis, (title, entries) in zip(axes.flat, groups, strict=False):
        _draw(axis, title, entries, styles)
    for axis in axes.flat[len(groups) :]:
        axis.set_visible(False)
    handles = [Line2D([], [], **styles[name]) for name in names]
    figure.legend(handles, names, loc="lower center", ncols=min(4, len(names)), frameon=False)
    machine = f" on {bench.environment.gpu}" if bench.environment.gpu else ""
    figure.suptitle(f"Attention forward{machine}, 16,384 tokens in all, heads x head dim = 2048\n{TIMED}", fontsize=11)
    figure.tight_layout(rect=(0, 0.03 + 0.03 * -(-len(names) // 4), 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _style(number: int, generated: bool) -> dict[str, Any]:
    """Generated modules are drawn full and round, peers dashed and square, so that grey prints tell them apart."""
    import matplotlib

    colors = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
    color = colors[(2 * number) % 20 + (2 * number) // 20]
    return {
        "color": color,
        "linestyle": "-" if generated else "--",
        "marker": "o" if generated else "s",
        "markersize": 4,
    }


def _draw(axis: Any, title: str, entries: Sequence[CellResult], styles: dict[str, dict[str, Any]]) -> None:
    lengths = [entry.cell.seq_len for entry in entries]
    for name in competitors(entries):
        points = [
            (entry.cell.seq_len, result.tflops)
            for entry in entries
            if (result := _find(entry, name)) is not None and result.tflops is not None
        ]
        if points:
            axis.plot(*zip(*points, strict=True), **styles[name])
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [length_label(seq_len) for seq_len in lengths])
    axis.tick_params(labelbottom=True)
    axis.set_ylim(bottom=0)
    axis.set_title(title)
    axis.set_xlabel("sequence length")
    axis.set_ylabel("TFLOP/s")
    axis.grid(alpha=0.3)


def write_json(bench: Bench, path: Path) -> None:
    """Write everything measured as one JSON document."""
    import json

    write_text(path, json.dumps(bench.as_dict(), indent=2, sort_keys=True) + "\n")
