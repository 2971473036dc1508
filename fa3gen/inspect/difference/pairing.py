"""Which modules of two specs belong together: those with the same values of what the specs vary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fa3gen.base.errors import UserError
from fa3gen.inspect.difference.comparing import leaves
from fa3gen.spec.specfile import Variant


@dataclass(frozen=True)
class Named:
    """What one name on the command line stands for: its modules, and the fields that its spec varies."""

    name: str
    variants: tuple[Variant, ...]
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Pairs:
    """Modules that belong together, and those of each side that have no partner."""

    pairs: tuple[tuple[Variant, Variant], ...]
    only_old: tuple[Variant, ...] = ()
    only_new: tuple[Variant, ...] = ()


def pair(old: Named, new: Named) -> Pairs:
    """Pair modules by the values of the fields that either spec varies, or else of those that both vary.

    One module against one is a pair, whatever they are. A single module against a spec of many is compared with the
    one that it corresponds to, and the rest is of no interest. Raises UserError, with the choices, where no module has
    a partner or partners are not unique.
    """
    if len(old.variants) == len(new.variants) == 1:
        return Pairs(((old.variants[0], new.variants[0]),))
    either = tuple(dict.fromkeys((*old.axes, *new.axes)))
    both = tuple(axis for axis in old.axes if axis in new.axes)
    for axes in (either, both):
        found = _pairs_by(axes, old.variants, new.variants)
        if found is not None:
            alone = 1 in (len(old.variants), len(new.variants))
            return Pairs(found.pairs) if alone else found
    raise UserError(
        f"the modules of {old.name} and {new.name} cannot be paired by {', '.join(either)}; name one of each\n"
        f"    {old.name}: {_listed(old.variants)}\n    {new.name}: {_listed(new.variants)}"
    )


def _pairs_by(axes: Sequence[str], old: Sequence[Variant], new: Sequence[Variant]) -> Pairs | None:
    """Pairs with equal values of `axes`; None where there is none, or one module could have two partners."""
    olds = [(_values(variant, axes), variant) for variant in old]
    news = [(_values(variant, axes), variant) for variant in new]
    if len(dict(olds)) < len(olds) or len(dict(news)) < len(news):
        return None
    by_old, by_new = dict(olds), dict(news)
    pairs = tuple((variant, by_new[values]) for values, variant in olds if values in by_new)
    if not pairs:
        return None
    return Pairs(
        pairs,
        tuple(variant for values, variant in olds if values not in by_new),
        tuple(variant for values, variant in news if values not in by_old),
    )


def _values(variant: Variant, axes: Sequence[str]) -> tuple[object, ...]:
    """The values of the fields `axes`, each of which may be a part of the spec, such as a mask."""
    fields = leaves(variant.spec)
    return tuple(
        tuple((path, value) for path, value in fields.items() if path == axis or path.startswith(f"{axis}."))
        for axis in axes
    )


def _listed(variants: Sequence[Variant]) -> str:
    return ", ".join(variant.stem for variant in variants)
