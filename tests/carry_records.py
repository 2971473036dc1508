"""Records of speeds, carried over to files that compile to the code that was measured.

    python tests/carry_records.py FOLDER     from the root of a checkout; no GPU

`FOLDER` has generated modules as they were measured, of an earlier commit. Where a committed module of the same name is
another file now, both are compiled, and if they have the same instructions in the same order, the module's results in
generated/evidence/packed and generated/evidence/tuning name the present file, and as `ran` the one that was measured.
Others stay as they are, and the command fails. Speed is all that this carries over: that a module is right is shown by
running it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fa3gen.base.files import sha256  # noqa: E402
from fa3gen.compile import toolchain  # noqa: E402
from fa3gen.compile.compiler import Compiled, compile_many  # noqa: E402
from fa3gen.design.workspace import Workspace  # noqa: E402
from fa3gen.records import packed_records, tuning_records  # noqa: E402


def instructions(compiled: Compiled) -> list[str]:
    """All SASS of a module, a line for each instruction and label; without its kernels' names, which tell of types."""
    sass = re.sub(r"kernel_cutlass_\w+", "kernel", toolchain.disassemble(compiled.cubin))
    lines = [line.strip() for line in sass.splitlines()]
    return [line for line in lines if re.match(r"/\*[0-9a-f]+\*/|\.L", line)]


def main(folder: Path) -> int:
    """Carry over what can be; how many modules have other instructions than they had."""
    workspace = Workspace.find(ROOT)
    packed, tuned = packed_records.load_all(workspace), tuning_records.load_all(workspace)
    stems = sorted({result.stem for record in (*packed, *tuned) for result in record.results})
    files = {stem: (folder / f"{stem}.py", workspace.module_path(stem)) for stem in stems}
    pairs = {stem: (old, new) for stem, (old, new) in files.items() if old.is_file() and sha256(old) != sha256(new)}
    compiled = compile_many([path for pair in pairs.values() for path in pair])
    later, other = {}, []
    for stem, (old, new) in pairs.items():
        before, after = compiled[old], compiled[new]
        if not isinstance(before, Compiled) or not isinstance(after, Compiled):
            raise next(error for error in (before, after) if not isinstance(error, Compiled))
        code = instructions(before)
        if code == instructions(after):
            later[sha256(old)] = sha256(new)
        else:
            other.append(stem)
        print(f"{stem}: {len(code)} lines of SASS, {'others now' if stem in other else 'the same'}", flush=True)
    for kind, records in ((packed_records, packed), (tuning_records, tuned)):
        results = ([result.carried(later) for result in record.results] for record in records)
        kind.save(
            workspace, [each.model_copy(update={"results": new}) for each, new in zip(records, results, strict=True)]
        )
    return len(other)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]).resolve()))
