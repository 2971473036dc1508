"""The two sides of a comparison in one workspace: rendered in memory, whether or not they lie on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fa3gen.design.workspace import Workspace
from fa3gen.generate.plan import make_plan
from fa3gen.generate.render import render_variant
from fa3gen.inspect.difference.comparing import compare
from fa3gen.inspect.difference.model import Difference, Side
from fa3gen.inspect.difference.pairing import Named, pair
from fa3gen.spec.specfile import Variant


def difference(old: str, new: str, workspace: Workspace, *, with_source: bool = True) -> Difference:
    """What differs between two specs or modules, by name: stems, or paths of spec files or of generated modules.

    Raises UserError for unknown names, with the nearest ones, and where modules cannot be paired.
    """
    pairs = pair(named(old, workspace), named(new, workspace))
    return Difference(
        tuple(
            compare(
                side_of(left, workspace, with_source=with_source), side_of(right, workspace, with_source=with_source)
            )
            for left, right in pairs.pairs
        ),
        only_old=stems(pairs.only_old),
        only_new=stems(pairs.only_new),
    )


def named(name: str, workspace: Workspace) -> Named:
    """What a name stands for; the path of a generated module stands for that module."""
    stem = Path(name).stem if name.endswith(".py") else name
    spec_file = workspace.named_file(name) if stem == name else None
    if spec_file is None:
        return Named(stem, tuple(workspace.resolve(name)), ())
    return Named(stem, spec_file.variants, tuple(spec_file.matrix))


def side_of(variant: Variant, workspace: Workspace, *, with_source: bool) -> Side:
    """One module as its spec has it now; a note says where the file on the disk is another one."""
    path = workspace.path_of(variant)
    name = f"generated/{variant.stem}.py"
    text, notes = None, []
    if with_source:
        present = path.read_bytes().decode("utf-8", errors="replace") if path.is_file() else None
        text = render_variant(variant, workspace, formatted=[present] if present else [])
        if present not in (None, text):
            notes.append(
                f"{workspace.shown(path)} is not what {variant.source} renders to; compared is the rendering "
                f"(`fa3gen render {variant.source}` writes it)"
            )
    return Side(
        stem=variant.stem,
        source=variant.source.as_posix(),
        summary=variant.summary,
        spec=variant.spec,
        plan=make_plan(variant),
        module=text,
        module_name=name,
        notes=tuple(notes),
        origins=variant.origins,
    )


def stems(variants: Sequence[Variant]) -> tuple[str, ...]:
    """Their stems."""
    return tuple(variant.stem for variant in variants)
