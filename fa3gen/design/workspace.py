"""Where specs, templates and generated modules lie, and what the names a user types stand for.

A workspace is a directory with `specs/` and `generated/`: a checkout of fa3gen, or a directory of the user's own. The
specs and templates that come with the package serve everywhere as a read-only fallback.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from fa3gen.base.errors import Problem, SpecError, UserError
from fa3gen.design.load import load
from fa3gen.spec.complaints import nearest
from fa3gen.spec.specfile import SpecFile, Variant


def bundled_data() -> Path:
    """The directory with the `specs`, `templates` and `generated` of the installed package.

    A wheel carries them in `fa3gen/data`; a checkout (an editable install) has them beside the package.
    """
    package = Path(__file__).resolve().parents[1]
    data = package / "data"
    return data if data.is_dir() else package.parent


@dataclass(frozen=True)
class Workspace:
    """The directories that a command works on. `bundled` is read only, unless it is `root` itself."""

    root: Path
    bundled: Path

    @classmethod
    def find(cls, start: Path | None = None) -> "Workspace":
        """The nearest of `start` (default: the working directory) and its parents with `specs/` and `generated/`.

        Where there is none, `start` itself is the workspace, and what the package brings is read from there.
        """
        start = (start or Path.cwd()).resolve()
        for folder in (start, *start.parents):
            if (folder / "specs").is_dir() and (folder / "generated").is_dir():
                return cls(folder, bundled_data())
        return cls(start, bundled_data())

    @property
    def specs_dir(self) -> Path:
        """Where this workspace's own specs lie; it need not exist yet."""
        return self.root / "specs"

    @property
    def generated_dir(self) -> Path:
        """Where modules are rendered to; it need not exist yet."""
        return self.root / "generated"

    @property
    def evidence_dir(self) -> Path:
        """Where verification records lie; it need not exist yet."""
        return self.generated_dir / "evidence"

    @property
    def templates_dir(self) -> Path:
        """The workspace's own templates, or else those of the package."""
        own = self.root / "templates"
        return own if own.is_dir() else self.bundled / "templates"

    @property
    def bundled_specs_dir(self) -> Path:
        """The specs of the package; the same as `specs_dir` in the checkout that is installed."""
        return self.bundled / "specs"

    def spec_files(self) -> list[Path]:
        """The workspace's own spec files, by name."""
        return sorted(self.specs_dir.glob("*.yaml"))

    def bundled_spec_files(self) -> list[Path]:
        """The spec files of the package that the workspace does not have under the same name."""
        own = {path.name for path in self.spec_files()}
        return [path for path in sorted(self.bundled_specs_dir.glob("*.yaml")) if path.name not in own]

    def module_path(self, stem: str) -> Path:
        """Where the module `stem` is rendered to."""
        return self.generated_dir / f"{stem}.py"

    def rendered_path(self, stem: str) -> Path:
        """Where the module `stem` lies: here, or in the package when no spec of this workspace generates it.

        It need not exist; then it is where it would be rendered to.
        """
        own, packaged = self.module_path(stem), self.bundled / "generated" / f"{stem}.py"
        # Of the workspace's own spec, the package's module is another one.
        return packaged if not own.is_file() and packaged.is_file() and not self.owns(stem) else own

    def shown(self, path: Path) -> Path:
        """`path` as people write it: relative to the root where it lies inside."""
        return path.relative_to(self.root) if path.is_relative_to(self.root) else path

    def owns(self, stem: str) -> bool:
        """Whether one of the workspace's own specs generates the module `stem`."""
        files = [path for path in self.spec_files() if stem == path.stem or stem.startswith(f"{path.stem}_")]
        return any(variant.stem == stem for path in files for variant in self.load(path).variants)

    def load(self, path: Path) -> SpecFile:
        """Load one spec file; stems in `extends` are found in this workspace and in the package."""
        roots, search = (self.root, self.bundled), (self.specs_dir, self.bundled_specs_dir)
        return load(path, roots=roots, search=search)

    def load_all(self) -> list[SpecFile]:
        """All of the workspace's own specs.

        Raises SpecError with the problems of all files, stems that two files generate among them.
        """
        return self._load_each(self.spec_files())

    def load_bundled(self) -> list[SpecFile]:
        """The specs of the package that the workspace does not have under the same name."""
        return self._load_each(self.bundled_spec_files())

    def resolve(self, name: str) -> list[Variant]:
        """The variants that `name` stands for: a path to a spec file, a spec stem, or one generated stem.

        Paths are taken from the working directory, then from the root, then from the package (`specs/k4_2.yaml`). The
        workspace's own specs come before those of the package. Raises UserError with the nearest names when there is
        no such spec.
        """
        spec_file = self.named_file(name)
        if spec_file is not None:
            return list(spec_file.variants)
        files = [*self.spec_files(), *self.bundled_spec_files()]
        # Only a spec whose stem begins the name can generate it; the others need not be read.
        owners = [self.load(path) for path in files if name.startswith(f"{path.stem}_")]
        found = [variant for owner in owners for variant in owner.variants if variant.stem == name]
        if len(found) > 1:
            raise UserError(f"'{name}' is generated by {_listed(v.source for v in found)}; rename one of them")
        if not found:
            raise UserError(self._unknown(name, files))
        return found

    def named_file(self, name: str) -> SpecFile | None:
        """The spec file that a path or a spec stem stands for, as in `resolve`; None for any other name.

        Raises UserError with the nearest stems for a path where there is no file.
        """
        if "/" in name or name.endswith((".yaml", ".yml")):
            return self.load(self.find_spec(name))
        files = [*self.spec_files(), *self.bundled_spec_files()]
        return next((self.load(path) for path in files if path.stem == name), None)

    def file_of(self, variant: Variant) -> SpecFile:
        """The spec file that a variant comes from."""
        return self.load(self.find_spec(variant.source))

    def select(self, names: Iterable[str]) -> list[Variant]:
        """The variants that names on a command line stand for, each once; all of the workspace's own without names.

        Raises UserError as `resolve` does, and when there is nothing at all.
        """
        names = list(names)
        if names:
            found = [variant for name in names for variant in self.resolve(name)]
        else:
            found = [variant for spec_file in self.load_all() for variant in spec_file.variants]
        if not found:
            raise UserError(f"there is no spec in {self.specs_dir}; name one, or begin with `fa3gen new`")
        return list({variant.stem: variant for variant in found}.values())

    def extending(self, stems: Collection[str]) -> list[SpecFile]:
        """The workspace's own specs that extend one of these, directly or not, but for those that cannot be read."""
        found = []
        for path in self.spec_files():
            try:
                spec_file = self.load(path)
            except SpecError:
                continue
            if spec_file.stem not in stems and not set(stems).isdisjoint(spec_file.bases):
                found.append(spec_file)
        return found

    def not_rendered(self, missing: Iterable[Variant]) -> UserError:
        """The error for modules that are not there, with the command that writes them."""
        missing = list(missing)
        paths = ", ".join(str(self.module_path(variant.stem)) for variant in missing)
        sources = " ".join(dict.fromkeys(str(variant.source) for variant in missing))
        return UserError(f"not rendered yet: {paths}; write them with: fa3gen render {sources}")

    def _load_each(self, paths: Iterable[Path]) -> list[SpecFile]:
        files: list[SpecFile] = []
        problems: list[Problem] = []
        for path in paths:
            try:
                files.append(self.load(path))
            except SpecError as error:
                problems.extend(error.problems)
        problems.extend(_ambiguous_stems(files))
        if problems:
            raise SpecError(list(dict.fromkeys(problems)))
        return files

    def find_spec(self, name: str | Path) -> Path:
        """The file that a path stands for: seen from the working directory, from the root, or from the package.

        Raises UserError with the nearest stems when there is no such file.
        """
        for path in (Path(name), self.root / name, self.bundled / name):
            if path.is_file():
                return path
        stems = [path.stem for path in (*self.spec_files(), *self.bundled_spec_files())]
        raise UserError(f"there is no spec file {name}{nearest(Path(name).stem, stems)} (`fa3gen list` shows all)")

    def _unknown(self, name: str, files: Iterable[Path]) -> str:
        known: list[str] = []
        for path in files:
            known.append(path.stem)
            try:
                known.extend(variant.stem for variant in self.load(path).variants)
            except SpecError:  # a broken spec has no variants to offer; its own errors are not the question here
                continue
        if not known:
            return f"there is no spec '{name}': neither {self.specs_dir} nor the package holds any"
        return f"there is no spec or module '{name}'{nearest(name, known)} (`fa3gen list` shows all)"


def _ambiguous_stems(files: Iterable[SpecFile]) -> list[Problem]:
    """Names that two spec files lay claim to, as the stem of the spec or of a module that it generates."""
    claimed: dict[str, SpecFile] = {}
    problems = []
    for spec_file in files:
        for stem in dict.fromkeys((spec_file.stem, *(variant.stem for variant in spec_file.variants))):
            other = claimed.setdefault(stem, spec_file)
            if other is not spec_file:
                message = f"the name '{stem}' is also claimed by {other.path}; rename one of the files"
                problems.append(Problem(spec_file.path, None, "", message))
    return problems


def _listed(paths: Iterable[Path]) -> str:
    return " and ".join(str(path) for path in paths)
