"""`fa3gen render`: specs to generated modules, or a check that the committed ones are what their specs render to."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from fa3gen.base.wording import counted
from fa3gen.cli import completion

if TYPE_CHECKING:
    from fa3gen.design.workspace import Workspace
    from fa3gen.generate.render import Rendered
    from fa3gen.generate.writing import Edited
    from fa3gen.spec.specfile import SpecFile


def render(
    specs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SPEC", autocompletion=completion.specs, help="Spec files, spec stems or module stems; all if none."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 with the diff where files drifted.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite generated files that were edited by hand.")] = False,
) -> None:
    """Render specs to modules under generated/ and say what changed.

    The modules of a spec file that lies outside specs/ are written beside it; so they are found by every command.
    What the rules of taste have against a spec is a warning on standard error; so it is in `compile` and `verify`.
    """
    from fa3gen.cli.advice import note, warn
    from fa3gen.design.workspace import Workspace
    from fa3gen.generate.render import render_all
    from fa3gen.generate.writing import alone

    workspace = Workspace.find()
    variants = workspace.select(specs or ())
    # All of them, also when one spec is rendered: a stem belongs to one spec.
    spec_files, problems = workspace.survey({variant.source for variant in variants})
    note(problems)
    warn(variants)
    if check:
        _check(render_all(variants, workspace), spec_files if not specs else None, workspace)
        return
    with alone(variants, workspace):
        rendered = render_all(variants, workspace)
        _write(rendered, workspace, force=force)
    _say_written(rendered, spec_files if not specs else None, workspace)
    _tell_what_else_changes(rendered, workspace)
    _tell_what_follows(rendered, workspace)


def _mending_command(rendered: list[Rendered]) -> str:
    return "fa3gen render " + " ".join(dict.fromkeys(str(item.variant.source) for item in rendered))


def _check(rendered: list[Rendered], spec_files: list[SpecFile] | None, workspace: Workspace) -> None:
    from fa3gen.generate.render import orphans

    drifted = [item for item in rendered if item.change != "unchanged"]
    for item in drifted:
        print(item.diff(workspace.root), end="")
    left_over = orphans(spec_files, workspace) if spec_files is not None else []
    missing = sum(item.change == "new" for item in drifted)
    if drifted:
        found = f"{len(drifted) - missing} drifted, {missing} missing of {counted(len(rendered), 'module')}"
        force = " --force" if _hand_edited(drifted, workspace) else ""  # without it, edits would be kept
        print(f"{found}; run `{_mending_command(drifted)}{force}`", file=sys.stderr)
    for path in left_over:
        name = workspace.shown(path)
        print(f"{name}: no spec renders to it; run `rm {name}` or give it a spec", file=sys.stderr)
    if spec_files is not None:
        _say_strays(spec_files, workspace)
    _tell_what_else_changes(rendered, workspace)
    if drifted or left_over:
        raise typer.Exit(1)
    if spec_files is not None:
        _check_evidence(workspace)
    what = "is what its spec renders to" if len(rendered) == 1 else "are what their specs render to"
    print(f"{counted(len(rendered), 'module')} {what}")


def _hand_edited(rendered: list[Rendered], workspace: Workspace) -> list[Edited]:
    """Files that are not to be overwritten; what evidence was recorded of is no edit."""
    from fa3gen.generate.writing import hand_edited
    from fa3gen.records import evidence

    return hand_edited(rendered, lambda variant: evidence.digests(workspace.home_of(variant), variant.stem))


def _write(rendered: list[Rendered], workspace: Workspace, *, force: bool) -> None:
    """Write what changed; UserError, and nothing is written, where somebody may have edited a file."""
    from fa3gen.base.errors import UserError
    from fa3gen.generate.writing import write_all

    edited = [] if force else _hand_edited(rendered, workspace)
    if edited:
        tracked = [str(workspace.shown(file.path)) for file in edited if file.tracked]
        ways = [f"commit or `git checkout` {'them' if len(tracked) == len(edited) else ' '.join(tracked)}"] * bool(
            tracked
        )
        ways += ["keep a copy under another name"] * (len(tracked) < len(edited))
        names = "\n".join(f"{workspace.shown(file.path)}: {file.why}" for file in edited)
        raise UserError(
            f"{names}\nnothing was written; {', '.join(ways)}, move the edits into the templates, "
            "or overwrite them with --force"
        )
    write_all(rendered)


def _say_written(rendered: list[Rendered], spec_files: list[SpecFile] | None, workspace: Workspace) -> None:
    from fa3gen.generate.render import orphans

    for item in rendered:
        if item.change != "unchanged":
            print(f"{item.change:9} {workspace.shown(item.path)}  ({item.text.count(chr(10))} lines)")
    unchanged = sum(item.change == "unchanged" for item in rendered)
    if unchanged:
        print(f"unchanged {unchanged} of {counted(len(rendered), 'module')}")
    if spec_files is not None:
        for path in orphans(spec_files, workspace):
            name = workspace.shown(path)
            print(f"orphan    {name}: no spec renders to it; remove it or give it a spec", file=sys.stderr)
        _say_strays(spec_files, workspace)


def _say_strays(spec_files: list[SpecFile], workspace: Workspace) -> None:
    """Name files that are not ours to judge: doctor counts them among the modules, and no spec is behind them."""
    from fa3gen.generate.render import strays

    for path in strays(spec_files, workspace):
        name = workspace.shown(path)
        print(f"stray     {name}: not written by fa3gen, and no spec renders to it; move it elsewhere", file=sys.stderr)


def _check_evidence(workspace: Workspace) -> None:
    """What `generated/` says of its modules has to be about the present ones."""
    from fa3gen.inspect import pages

    problem = pages.check_evidence(workspace)
    if problem is not None:
        print(problem, file=sys.stderr)
        raise typer.Exit(1)


def _changed(rendered: list[Rendered], workspace: Workspace) -> list[Rendered]:
    """New modules and changed ones, but for those beside a spec outside specs/: no page nor spec builds upon them."""
    return [item for item in rendered if item.change != "unchanged" and not workspace.home_of(item.variant).loose]


def _tell_what_follows(rendered: list[Rendered], workspace: Workspace) -> None:
    """Where there are pages about modules, they speak of other files now."""
    from fa3gen.inspect import pages

    if pages.evidence_page(workspace).is_file() and _changed(rendered, workspace):
        print(
            f"then      `{pages.REFRESH}` renews the pages about these modules and says what has to be measured again"
        )


def _tell_what_else_changes(rendered: list[Rendered], workspace: Workspace) -> None:
    """A field of a spec moves the modules of the specs that extend it, too."""
    from fa3gen.generate.render import render_all
    from fa3gen.inspect.difference.extending import also_changes

    found = _changed(rendered, workspace)
    changed = list(dict.fromkeys(item.variant.source.stem for item in found if item.change == "changed"))
    if not changed:
        return
    named = {item.variant.stem for item in rendered}
    extending = [variant for spec_file in workspace.extending(changed) for variant in spec_file.variants]
    others = render_all([variant for variant in extending if variant.stem not in named], workspace)
    moved = [item.variant for item in others if item.change == "changed"]
    if moved:
        specs = " ".join(dict.fromkeys(variant.source.stem for variant in moved))
        print(f"{also_changes(moved, changed)}; `fa3gen render {specs}` writes them")
