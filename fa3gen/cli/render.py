"""`fa3gen render`: specs to generated modules, or a check that the committed ones are what their specs render to."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fa3gen.design.workspace import Workspace
    from fa3gen.generate.render import Rendered
    from fa3gen.spec.specfile import SpecFile, Variant


def render(
    specs: Annotated[
        list[str] | None,
        typer.Argument(metavar="SPEC", help="Spec files, spec stems or module stems; all if none."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 with the diff where files drifted.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite generated files that were edited by hand.")] = False,
) -> None:
    """Render specs to modules under generated/ and say what changed.

    What the rules of taste have against a spec is a warning on standard error; so it is in `compile` and `verify`.
    """
    from fa3gen.cli.advice import warn
    from fa3gen.design.workspace import Workspace
    from fa3gen.generate.render import render_all

    workspace = Workspace.find()
    # All of them, also when one spec is rendered: a stem belongs to one spec.
    own = workspace.load_all()
    spec_files = [*own, *workspace.load_bundled()]
    everything = [variant for spec_file in own for variant in spec_file.variants]
    variants = everything if everything and not specs else workspace.select(specs or ())
    _require_owners(variants, spec_files, workspace)
    warn(variants)
    rendered = render_all(variants, workspace)
    if check:
        _tell_what_else_changes(rendered, workspace)
        _check(rendered, spec_files if not specs else None, workspace)
    else:
        _write(rendered, spec_files if not specs else None, workspace, force=force)
        _tell_what_else_changes(rendered, workspace)


def _require_owners(variants: list[Variant], spec_files: list[SpecFile], workspace: Workspace) -> None:
    """Refuse specs from elsewhere: no later `--check` would know them, and their stems may belong to others."""
    from fa3gen.base.errors import UserError

    owners = {variant.stem: variant.source for spec_file in spec_files for variant in spec_file.variants}
    strays = dict.fromkeys(str(variant.source) for variant in variants if owners.get(variant.stem) != variant.source)
    if strays:
        folder = workspace.shown(workspace.specs_dir)
        raise UserError(
            "\n".join(f"{stray}: only specs/*.yaml is rendered; move it to {folder}/ and run again" for stray in strays)
        )


def _mending_command(rendered: list[Rendered]) -> str:
    return "fa3gen render " + " ".join(dict.fromkeys(str(item.variant.source) for item in rendered))


def _check(rendered: list[Rendered], spec_files: list[SpecFile] | None, workspace: Workspace) -> None:
    from fa3gen.generate.render import hand_edited, orphans

    drifted = [item for item in rendered if item.change != "unchanged"]
    for item in drifted:
        print(item.diff(workspace.root), end="")
    left_over = orphans(spec_files, workspace) if spec_files is not None else []
    missing = sum(item.change == "new" for item in drifted)
    if drifted:
        found = f"{len(drifted) - missing} drifted, {missing} missing of {len(rendered)} modules"
        force = " --force" if hand_edited(drifted, workspace) else ""  # without it, edits would be kept
        print(f"{found}; run `{_mending_command(drifted)}{force}`", file=sys.stderr)
    for path in left_over:
        name = workspace.shown(path)
        print(f"{name}: no spec renders to it; run `rm {name}` or give it a spec", file=sys.stderr)
    if drifted or left_over:
        raise typer.Exit(1)
    if spec_files is not None:
        _check_evidence(workspace)
    print(f"{len(rendered)} modules are what their specs render to")


def _write(rendered: list[Rendered], spec_files: list[SpecFile] | None, workspace: Workspace, *, force: bool) -> None:
    from fa3gen.base.errors import UserError
    from fa3gen.generate.render import hand_edited, orphans, remember, write

    edited = [] if force else hand_edited(rendered, workspace)
    if edited:
        names = "\n".join(f"{workspace.shown(path)}: has uncommitted edits" for path in edited)
        raise UserError(
            f"{names}\nnothing was written; commit or `git checkout` them, move the edits into the templates, "
            "or overwrite them with --force"
        )
    for item in rendered:
        if item.change != "unchanged":
            write(item)
            print(f"{item.change:9} {workspace.shown(item.path)}  ({item.text.count(chr(10))} lines)")
    remember(rendered, workspace)
    _tell_what_follows(rendered, workspace)
    unchanged = sum(item.change == "unchanged" for item in rendered)
    if unchanged:
        print(f"unchanged {unchanged} of {len(rendered)} modules")
    for path in orphans(spec_files, workspace) if spec_files is not None else []:
        print(
            f"orphan    {workspace.shown(path)}: no spec renders to it; remove it or give it a spec",
            file=sys.stderr,
        )


def _check_evidence(workspace: Workspace) -> None:
    """What `generated/` says of its modules has to be about the present ones."""
    from fa3gen.inspect import pages

    problem = pages.check_evidence(workspace)
    if problem is not None:
        print(problem, file=sys.stderr)
        raise typer.Exit(1)


def _tell_what_follows(rendered: list[Rendered], workspace: Workspace) -> None:
    """Where there are pages about modules, they speak of other files now."""
    from fa3gen.inspect import pages

    if pages.evidence_page(workspace).is_file() and any(item.change != "unchanged" for item in rendered):
        print(
            f"then      `{pages.REFRESH}` renews the pages about these modules and says what has to be measured again"
        )


def _tell_what_else_changes(rendered: list[Rendered], workspace: Workspace) -> None:
    """A field of a spec moves the modules of the specs that extend it, too."""
    from fa3gen.generate.render import render_all
    from fa3gen.inspect.difference.extending import also_changes

    changed = list(dict.fromkeys(item.variant.source.stem for item in rendered if item.change == "changed"))
    named = {item.variant.stem for item in rendered}
    found = [variant for spec_file in workspace.extending(changed) for variant in spec_file.variants]
    others = render_all([variant for variant in found if variant.stem not in named], workspace)
    moved = [item.variant for item in others if item.change == "changed"]
    if moved:
        specs = " ".join(dict.fromkeys(variant.source.stem for variant in moved))
        print(f"{also_changes(moved, changed)}; `fa3gen render {specs}` writes them")
