"""What a shell offers when the Tab key is pressed: reads names of files, and no file."""

from __future__ import annotations

from pathlib import Path


def specs(incomplete: str) -> list[str]:
    """Stems of specs and of rendered modules, those of the package too; paths where the word looks like one."""
    if "/" in incomplete or incomplete.startswith("."):
        return _paths(incomplete)
    from fa3gen.design.workspace import Workspace

    workspace = Workspace.find()
    files = [*workspace.spec_files(), *workspace.bundled_spec_files()]
    for folder in (workspace.generated_dir, workspace.package.generated_dir):
        files += sorted(folder.glob("*.py"))
    return [stem for stem in dict.fromkeys(path.stem for path in files) if stem.startswith(incomplete)]


def _paths(incomplete: str) -> list[str]:
    folder, _, name = incomplete.rpartition("/")
    found = sorted(Path(folder or ("/" if incomplete.startswith("/") else ".")).glob(f"{name}*"))
    prefix = incomplete.removesuffix(name)
    return [
        f"{prefix}{path.name}/" if path.is_dir() else f"{prefix}{path.name}"
        for path in found
        if path.is_dir() or path.suffix in (".yaml", ".py")
    ]


def chips(incomplete: str) -> list[str]:
    """The chips of which there are figures."""
    from fa3gen.hardware.chips import CHIPS

    return [name for name in CHIPS if name.startswith(incomplete.lower())]
