"""Where specs, templates and generated modules lie, and what the names a user types stand for.

A workspace is a directory with `specs/` and `generated/`: a checkout of fa3gen, or a directory of the user's own. The
specs and templates that come with the package serve everywhere as a read-only fallback. A spec file that lies anywhere
else is rendered beside itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from fa3gen.base.errors import Problem, SpecError, UserError
from fa3gen.base.files import by_name
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
    """The directories that a command works on. `bundled` is read only, unless it is `root` itself.

    `loose`: a folder of spec files that are no workspace's; their modules lie beside them.
    """

    root: Path
    bundled: Path
    loose: bool = False

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
        return self.root if self.loose else self.root / "specs"

    @property
    def generated_dir(self) -> Path:
        """Where modules are rendered to; it need not exist yet."""
        return self.root if self.loose else self.root / "generated"

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

    @property
    def package(self) -> "Workspace":
        """What the package brings, with the records of its modules."""
        return Workspace(self.bundled, self.bundled)

    def spec_files(self) -> list[Path]:
        """The workspace's own spec files, by name."""
        return by_name(self.specs_dir.glob("*.yaml"))

    def bundled_spec_files(self) -> list[Path]:
        """The spec files of the package that the workspace does not have under the same name."""
        if self.bundled_specs_dir == self.specs_dir:
            return []
        own = {path.name for path in self.spec_files()}
        return [path for path in by_name(self.bundled_specs_dir.glob("*.yaml")) if path.name not in own]

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

    def home_of(self, variant: Variant) -> "Workspace":
        """Where a variant is rendered to: here, or in the folder of a spec file that lies outside `specs/`."""
        folders = (self.specs_dir.resolve(), self.bundled_specs_dir.resolve())
        # A path that is not absolute is shown from the root, or else as it was given, from the working directory.
        candidates = (self.root / variant.source, variant.source, self.bundled / variant.source)
        found = next((path.resolve().parent for path in candidates if path.is_file()), folders[0])
        return self if found in folders else Workspace(found, self.bundled, loose=True)

    def place_of(self, variant: Variant) -> "Workspace":
        """Where the module of a variant and its records lie: its home, or the package if it was not rendered here.

        The module need not exist; then this is where it would be rendered to.
        """
        home = self.home_of(variant)
        if home.loose:
            return home
        return self if self.rendered_path(variant.stem) == self.module_path(variant.stem) else self.package

    def path_of(self, variant: Variant) -> Path:
        """Where the module of a variant lies; see `place_of`."""
        return self.place_of(variant).module_path(variant.stem)

    def shown(self, path: Path) -> Path:
        """`path` as people write it: relative to the root where it lies inside."""
        return path.relative_to(self.root) if path.is_relative_to(self.root) else path

    def owns(self, stem: str) -> bool:
        """Whether one of the workspace's own specs generates the module `stem`."""
        files = [path for path in self.spec_files() if stem == path.stem or stem.startswith(f"{path.stem}_")]
        return any(variant.stem == stem for file in self._sound(files)[0] for variant in file.variants)

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

    def survey(self, needed: Collection[Path] = ()) -> tuple[list[SpecFile], list[Problem]]:
        """The specs of the workspace and of the package that are sound, and what is wrong with the others.

        `needed` are paths of spec files, as they are shown: SpecError where another file claims a name of theirs.
        """
        files, problems = self._sound([*self.spec_files(), *self.bundled_spec_files()])
        clashes = _ambiguous_stems(files)
        if fatal := [problem for *both, problem in clashes if any(file.path in needed for file in both)]:
            raise SpecError(fatal)
        return files, [*problems, *(problem for *_, problem in clashes)]

    def resolve(self, name: str) -> list[Variant]:
        """The variants that `name` stands for: the path of a spec file or generated file, a spec stem or a module's.

        Paths are taken from the working directory, then from the root, then from the package (`specs/k4_2.yaml`). The
        workspace's own specs come before those of the package. Raises UserError with the nearest names when there is
        no such spec.
        """
        if name.endswith(".py"):
            return self._of_module(Path(name))
        files = [*self.spec_files(), *self.bundled_spec_files()]
        spec_file = self._named_among(name, files)
        if spec_file is not None:
            return list(spec_file.variants)
        # Only a spec whose stem begins the name can generate it; the others need not be read.
        owners, problems = self._sound(path for path in files if name.startswith(f"{path.stem}_"))
        found = [variant for owner in owners for variant in owner.variants if variant.stem == name]
        if len(found) > 1:
            raise UserError(f"'{name}' is generated by {_listed(v.source for v in found)}; rename one of them")
        if not found and problems:  # it may be a module of a broken spec
            raise SpecError(problems)
        if not found:
            raise UserError(self._unknown(name, files))
        return found

    def _of_module(self, path: Path) -> list[Variant]:
        """The variant of a generated file: of a spec that lies beside it, or of the workspace or the package."""
        beside, _ = self._sound(file for file in path.parent.glob("*.yaml") if path.stem.startswith(file.stem))
        found = [variant for file in beside for variant in file.variants if variant.stem == path.stem]
        return found or self.resolve(path.stem)

    def named_file(self, name: str) -> SpecFile | None:
        """The spec file that a path or a spec stem stands for, as in `resolve`; None for any other name.

        Raises UserError with the nearest stems for a path where there is no file.
        """
        return self._named_among(name, [*self.spec_files(), *self.bundled_spec_files()])

    def _named_among(self, name: str, files: Iterable[Path]) -> SpecFile | None:
        """As `named_file`; `files` are all spec files, for who has listed them."""
        if "/" in name or name.endswith((".yaml", ".yml")):
            return self.load(self.find_spec(name))
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
        chosen: dict[str, Variant] = {}
        for variant in found:
            other = chosen.setdefault(variant.stem, variant)
            if other.source != variant.source:
                sources = _listed((other.source, variant.source))
                raise UserError(f"'{variant.stem}' is a module of {sources}; name one of them at a time")
        return list(chosen.values())

    def require_recordable(self, variants: Iterable[Variant]) -> None:
        """Raise UserError for modules that have no records here: those outside `generated/`."""
        for variant in variants:
            place = self.place_of(variant)
            if place.loose:
                way_out = f"move it to {self.specs_dir} and render it there"
            else:
                way_out = f"render it here first: fa3gen render {variant.source}"
            if place != self:
                raise UserError(
                    f"{variant.source}: records are kept of modules in {self.generated_dir} only; {way_out}"
                )

    def extending(self, stems: Collection[str]) -> list[SpecFile]:
        """The workspace's own specs that extend one of these, directly or not, but for those that cannot be read."""
        files, _ = self._sound(self.spec_files())
        return [file for file in files if file.stem not in stems and not set(stems).isdisjoint(file.bases)]

    def not_rendered(self, missing: Iterable[Variant]) -> UserError:
        """The error for modules that are not there, with the command that writes them."""
        missing = list(missing)
        paths = ", ".join(str(self.path_of(variant)) for variant in missing)
        sources = " ".join(dict.fromkeys(str(variant.source) for variant in missing))
        return UserError(f"not rendered yet: {paths}; write them with: fa3gen render {sources}")

    def _load_each(self, paths: Iterable[Path]) -> list[SpecFile]:
        files, problems = self._sound(paths)
        problems.extend(problem for *_, problem in _ambiguous_stems(files))
        if problems:
            raise SpecError(list(dict.fromkeys(problems)))
        return files

    def _sound(self, paths: Iterable[Path]) -> tuple[list[SpecFile], list[Problem]]:
        files: list[SpecFile] = []
        problems: list[Problem] = []
        for path in paths:
            try:
                files.append(self.load(path))
            except SpecError as error:
                problems.extend(error.problems)
        return files, problems

    def find_spec(self, name: str | Path) -> Path:
        """The file that a path stands for: seen from the working directory, from the root, or from the package.

        Raises UserError with the nearest stems when there is no such file.
        """
        for path in (Path(name), self.root / name, self.bundled / name):
            if path.is_file():
                if path.suffix != ".yaml" and path.resolve().parent == self.specs_dir.resolve():
                    raise UserError(f"{name}: only specs/*.yaml are specs here; rename it to {path.stem}.yaml")
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


def _ambiguous_stems(files: Iterable[SpecFile]) -> list[tuple[SpecFile, SpecFile, Problem]]:
    """Pairs of files that lay claim to one name, as the stem of the spec or of a module that it generates."""
    claimed: dict[str, SpecFile] = {}
    problems = []
    for spec_file in files:
        for stem in dict.fromkeys((spec_file.stem, *(variant.stem for variant in spec_file.variants))):
            other = claimed.setdefault(stem, spec_file)
            if other is not spec_file:
                message = f"the name '{stem}' is also claimed by {other.path}; rename one of the files"
                problems.append((other, spec_file, Problem(spec_file.path, None, "", message)))
    return problems


def _listed(paths: Iterable[Path]) -> str:
    return " and ".join(str(path) for path in paths)
