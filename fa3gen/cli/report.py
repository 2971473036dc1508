"""`fa3gen report`: one self-contained HTML page per module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fa3gen.cli import completion


def report(
    specs: Annotated[
        list[str],
        typer.Argument(
            metavar="SPEC", autocompletion=completion.specs, help="Spec files, spec stems or generated stems."
        ),
    ],
    directory: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where to write; files of these names are replaced.")
    ] = Path("."),
) -> None:
    """Write STEM.html for each module: what it decides, where its bytes live, what the compiler made of it, how it did.

    Compiles the module (no GPU needed), runs one CTA and a few small inputs on the CPU model of sm_90a, and reads the
    records of GPU runs; nothing is measured. The page holds everything it shows: it opens from a file, without network.
    """
    from rich.console import Console

    from fa3gen.base.errors import UserError
    from fa3gen.base.files import write_text
    from fa3gen.design.workspace import Workspace
    from fa3gen.inspect.report import copied
    from fa3gen.inspect.report.gathering import gather
    from fa3gen.inspect.report.page import render
    from fa3gen.spec.model import Copy
    from fa3gen.spec.specfile import attention_only

    workspace = Workspace.find()
    variants = workspace.select(specs)
    attention = attention_only([each for each in variants if not isinstance(each.spec, Copy)], "fa3gen report")
    missing = [variant for variant in variants if not workspace.path_of(variant).is_file()]
    if missing:
        raise workspace.not_rendered(missing)
    console = Console(highlight=False)
    for variant in variants:
        if isinstance(variant.spec, Copy):
            page = copied.page(workspace, variant, variant.spec)
        else:
            page = render(gather(workspace, next(each for each in attention if each.stem == variant.stem)))
        file = directory / f"{variant.stem}.html"
        try:
            write_text(file, page)
        except OSError as error:
            raise UserError(f"cannot write to {directory}: {error.strerror}; choose another --output") from None
        console.print(f"wrote {file} ({len(page.encode()) / 1e6:.1f} MB)", markup=False, soft_wrap=True)
