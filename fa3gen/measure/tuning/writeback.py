"""A winner as a spec file: what differs from its base, and nothing else."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from fa3gen.base.errors import UserError
from fa3gen.base.files import sha256, write_text
from fa3gen.design.workspace import Workspace
from fa3gen.measure.tuning.session import Module
from fa3gen.measure.tuning.space import tree_of
from fa3gen.spec.complaints import UNIONS
from fa3gen.spec.model import Forward
from fa3gen.spec.specfile import SUMMARY_MAX, SpecFile, Variant, attention_only, is_stem
from fa3gen.spec.yamltree import dumps, merge


def differences(base: SpecFile, spec: Forward) -> dict[str, Any]:
    """The fields that make `spec` when they are laid on the base's fields, as a spec file has them.

    Leaves out what the base says already and what is a default; a union whose arm changes is given whole.
    """
    given = spec.model_dump(exclude_defaults=True)
    whole = spec.model_dump()
    changed: dict[str, Any] = {}
    for name, info in type(spec).model_fields.items():
        if name not in base.fields and getattr(spec, name) == info.get_default(call_default_factory=True):
            continue
        part = _part(base.fields.get(name), given.get(name), whole[name], UNIONS.get(name))
        if part is not None:
            changed[name] = part
    merged = merge(tree_of(base.fields, base.path), tree_of(changed, base.path), UNIONS)
    if Forward.model_validate(merged.plain()) != spec:  # a default that the base overrides inside a union, for one
        changed = {name: whole[name] for name in type(spec).model_fields if whole[name] != base.fields.get(name)}
    return changed


def _part(base: Any, given: Any, whole: Any, tag: str | None) -> Any:
    """What has to be written of one field; None for nothing. `given` leaves defaults out, `whole` does not."""
    if not isinstance(whole, Mapping):
        return None if whole == base or (base is None and given is None) else whole
    given = given or {}
    if not isinstance(base, Mapping) or (tag and base.get(tag) != whole[tag]):
        # The tag of an arm may be a default of its model, and is what a reader looks for.
        return {**({tag: whole[tag]} if tag else {}), **given} or None
    parts = {key: _part(base.get(key), given.get(key), value, None) for key, value in whole.items()}
    # None may be the value to write: `threads: null` takes out what the base gives.
    changed = {key: part for key, part in parts.items() if part is not None or (whole[key] is None and base.get(key))}
    return changed or None


def spec_text(base: SpecFile, spec: Forward, summary: str) -> str:
    """The text of a spec file with one module, `spec`, that extends `base`."""
    fields = differences(base, spec)
    if fields.get("mask", {}).keys() == {"kind"}:
        fields["mask"] = fields["mask"]["kind"]
    head = {"summary": textwrap.shorten(summary, SUMMARY_MAX, placeholder=""), "extends": base.stem}
    text = dumps(head, flow=False) + (dumps(fields, flow=None) if fields else "")
    # The base's matrix would render one module for each of its combinations.
    return text + ("matrix: {}\n" if base.matrix else "")


def check_name(workspace: Workspace, name: str, *, force: bool) -> None:
    """Raise UserError for a name that a spec file cannot have, or that is taken (with `force`: by another spec)."""
    if not is_stem(name):
        raise UserError(f"'{name}' cannot name a Python module; use letters, digits and underscores")
    target = workspace.specs_dir / f"{name}.yaml"
    if target.exists() and not force:
        raise UserError(
            f"{workspace.shown(target)} exists already; choose another --name, or overwrite it with --force"
        )
    files, _ = workspace.survey()
    taken = {stem: file.path for file in files if file.stem != name for stem in _stems(file)}
    if name in taken:
        raise UserError(f"the name '{name}' is taken by {taken[name]}; choose another --name")


def _stems(file: SpecFile) -> Iterable[str]:
    return (file.stem, *(variant.stem for variant in file.variants))


def write_winner(workspace: Workspace, name: str, base: SpecFile, measured: Module, summary: str) -> Module:
    """Write specs/<name>.yaml and generated/<name>.py; return the committed module.

    Raises UserError, leaving nothing behind, when what is rendered is not the very code that was measured.
    """
    from fa3gen.generate.render import render_all
    from fa3gen.generate.writing import alone, write_all

    target = workspace.specs_dir / f"{name}.yaml"
    before = target.read_text(encoding="utf-8") if target.exists() else None
    write_text(target, spec_text(base, measured.spec, summary))
    try:
        (variant,) = attention_only(workspace.load(target).variants, "fa3gen tune")
        with alone([variant], workspace):
            (rendered,) = render_all([variant], workspace)
            _require_same(variant, rendered.text, measured)
            write_all([rendered])
    except BaseException:
        if before is None:
            target.unlink()
        else:
            write_text(target, before)
        raise
    return Module(variant.stem, rendered.path, sha256(rendered.path), variant.spec)


def _require_same(variant: Variant[Forward], text: str, measured: Module) -> None:
    """The header names the spec file and its summary; all the rest has to be what was measured."""
    if variant.spec != measured.spec or code_of(text) != code_of(measured.path.read_text(encoding="utf-8")):
        raise UserError(
            f"{variant.stem} is not the code that was measured as {measured.stem} ({measured.path}): "
            "the templates have changed since; run `fa3gen tune` again"
        )


def code_of(source: str) -> str:
    """A module's source without its docstring: what is compiled."""
    docstring = ast.parse(source).body[0]
    lines = source.splitlines()
    return "\n".join([*lines[: docstring.lineno - 1], *lines[docstring.end_lineno or 0 :]])
