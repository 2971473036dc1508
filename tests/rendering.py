"""What the tests of the generator share: the checkout's specs and modules, each read or derived once per process."""

from __future__ import annotations

import ast
import gc
import json
import math
import shutil
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from fa3gen.base.files import sha256
from fa3gen.design.workspace import Workspace
from fa3gen.generate.plan import Plan, make_plan
from fa3gen.generate.writing import MEMORY
from fa3gen.spec.model import Combine, Copy, Forward, Gemm, Quantize
from fa3gen.spec.specfile import SpecFile, Variant, attention_among

ROOT = Path(__file__).resolve().parent.parent
CHECKOUT = Workspace.find(ROOT)
STEMS = sorted(path.stem for path in CHECKOUT.generated_dir.glob("*.py"))


@cache
def spec_files() -> tuple[SpecFile, ...]:
    """All specs of the checkout."""
    return tuple(CHECKOUT.load_all())


@cache
def variants() -> dict[str, Variant]:
    """Stem -> variant, for all specs of the checkout."""
    return {variant.stem: variant for spec_file in spec_files() for variant in spec_file.variants}


@cache
def samples() -> dict[str, Variant]:
    """Stem -> variant, for the tests' own specs: numbers derived by hand stay true when a committed spec changes."""
    files = [CHECKOUT.load(path) for path in sorted((ROOT / "tests" / "data" / "specs").glob("*.yaml"))]
    return {variant.stem: variant for spec_file in files for variant in spec_file.variants}


def named(stem: str) -> Variant:
    """One of the tests' own variants, or a committed one."""
    return samples().get(stem) or variants()[stem]


@cache
def attention_stems() -> tuple[str, ...]:
    """Stems of the modules that are attention."""
    return tuple(variant.stem for variant in attention_among(variants()[stem] for stem in STEMS))


@cache
def gemm_stems() -> tuple[str, ...]:
    """Stems of the modules that are GEMM."""
    return tuple(stem for stem in STEMS if isinstance(variants()[stem].spec, Gemm))


@cache
def copy_stems() -> tuple[str, ...]:
    """Stems of the modules that are copies."""
    return tuple(stem for stem in STEMS if isinstance(variants()[stem].spec, Copy))


@cache
def combine_stems() -> tuple[str, ...]:
    """Stems of the modules that merge parts."""
    return tuple(stem for stem in STEMS if isinstance(variants()[stem].spec, Combine))


@cache
def quantize_stems() -> tuple[str, ...]:
    """Stems of the modules that quantise."""
    return tuple(stem for stem in STEMS if isinstance(variants()[stem].spec, Quantize))


@cache
def plans() -> dict[str, Plan]:
    """Stem -> plan, for all specs of the checkout."""
    return {stem: make_plan(variant) for stem, variant in variants().items()}


@cache
def attention_plans() -> dict[str, Plan]:
    """Stem -> plan, for the modules that are attention."""
    return {stem: plans()[stem] for stem in attention_stems()}


@cache
def source(stem: str) -> str:
    """The committed module."""
    return CHECKOUT.module_path(stem).read_bytes().decode("utf-8")


@cache
def tree(stem: str) -> ast.Module:
    """The committed module, parsed.

    It is kept to the end, with some 10,000 objects, through which Python would look for garbage again and again.
    """
    if gc.isenabled():
        gc.collect(1)  # of what is younger nothing but garbage goes
    parsed = ast.parse(source(stem))
    if gc.isenabled():
        gc.freeze()
    return parsed


@cache
def walked(node: ast.AST) -> tuple[ast.AST, ...]:
    """A node of `tree` and all below it, by `ast.walk`: most of the time of reading modules is walking them."""
    return tuple(ast.walk(node))


def assert_none_in_modules(check: Callable[[str], list[str]]) -> None:
    """Fail with everything that `check` finds wrong with any committed module, given its stem."""
    found = [f"{stem}: {problem}" for stem in STEMS for problem in check(stem)]
    assert not found, "\n".join(found)


def changed(stem: str, **parts: Any) -> Variant:
    """A variant, as `named` gives it, with fields of top-level parts of its spec replaced, or a part of another kind.

    A part that is a word (`scheduler`) is replaced.
    """
    base = named(stem)
    fields = base.spec.model_dump()
    for name, part in parts.items():
        whole = isinstance(part, str) or any(key in part for key in ("kind", "engine", "through"))
        fields[name] = part if whole else {**fields[name], **part}
    return Variant(base.stem, Forward.model_validate(fields), base.source, base.summary)


def spec_of(stem: str) -> Forward:
    """The spec of a committed module."""
    spec = variants()[stem].spec
    assert isinstance(spec, Forward)
    return spec


def spec_with(stem: str, **parts: Any) -> Forward:
    """The spec of a module with other fields: `part={...}` changes some of a part, anything else replaces it."""
    data = spec_of(stem).model_dump()
    for part, value in parts.items():
        data[part] = {**data[part], **value} if isinstance(value, dict) and data[part] else value
    return Forward.model_validate(data)


FEW_SPECS = ("k1", "k4_2", "k4_smem")
FEW_MODULES = [f"{spec}_{variant}" for spec in FEW_SPECS for variant in ("d64", "d64_causal", "d128", "d128_causal")]


def small_checkout(folder: Path) -> None:
    """Put a checkout with three specs, just rendered, into an empty folder; no git.

    Its templates are the package's, compiled once for all tests: who edits them copies them first.
    """
    for name in ("specs", "generated"):
        (folder / name).mkdir()
    for spec in FEW_SPECS:
        shutil.copy(ROOT / "specs" / f"{spec}.yaml", folder / "specs")
    for stem in FEW_MODULES:
        shutil.copy(ROOT / "generated" / f"{stem}.py", folder / "generated")
    digests = {f"{stem}.py": sha256(folder / "generated" / f"{stem}.py") for stem in FEW_MODULES}
    (folder / "generated" / f".{MEMORY}").write_text(json.dumps(digests))


def constants(module: ast.Module) -> dict[str, int]:
    """The module's integer constants, by executing the constant assignments that need nothing imported."""
    return dict(_constants(module))


@lru_cache(maxsize=1024)  # tests ask several times for those of a committed module
def _constants(module: ast.Module) -> dict[str, int]:
    values: dict[str, Any] = {}
    for node in module.body:
        if not isinstance(node, ast.Assign):
            continue
        if all(name.id in values for name in ast.walk(node.value) if isinstance(name, ast.Name)):
            exec(compile(ast.Module([node], []), "<constants>", "exec"), {"__builtins__": {}}, values)
    return values


def extent(mode: int | tuple[int, ...]) -> int:
    """How many elements a mode of a layout has, `cute.size` of it: packed heads make a mode of two."""
    return mode if isinstance(mode, int) else math.prod(mode)
