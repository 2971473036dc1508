"""`fa3gen tune`: search the legal specs for the fastest modules at given shapes, and record what was measured."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fa3gen.base.errors import UserError
from fa3gen.base.wording import counted
from fa3gen.cli import completion, packed_speeds
from fa3gen.measure.tuning.heats import BURST_MS

if TYPE_CHECKING:
    from rich.console import Console

    from fa3gen.design.family import Family
    from fa3gen.design.workspace import Workspace
    from fa3gen.measure.tuning.candidates import Search
    from fa3gen.measure.tuning.heats import Heat
    from fa3gen.measure.tuning.journal import Journal
    from fa3gen.measure.tuning.session import Cell, Module, Outcome
    from fa3gen.records.dispatch_table import Record
    from fa3gen.records.tuning_records import TunedProblem, TuningRecord
    from fa3gen.run.dispatch import Row
    from fa3gen.spec.model import Forward
    from fa3gen.spec.specfile import Variant

SEQ_LENS = "512,1024,2048,4096,8192,16384"


@dataclass(frozen=True)
class Shapes:
    """Which shapes are asked for: lengths (queries, keys), batches and heads (of q, of k) or what these follow from."""

    lengths: tuple[tuple[int, int], ...]
    tokens: int
    hidden: int
    batches: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]

    def problems(self, family: Family) -> list[TunedProblem]:
        """A problem for each pair of heads, batch and length.

        Without heads there are as many as fit into --hidden, as in `fa3gen explain`. Raises UserError where not even
        one does, or --tokens is uneven.
        """
        from fa3gen.design.family import Shape
        from fa3gen.records.tuning_records import TunedProblem

        return [
            TunedProblem.of(family, Shape(batch, seq_q, seq_k, heads_q, heads_kv))
            for heads_q, heads_kv in self.heads or self._of_hidden(family.head_dim)
            for seq_q, seq_k in self.lengths
            for batch in self.batches or self._of_tokens(max(seq_q, seq_k))
        ]

    def _of_hidden(self, dim: int) -> tuple[tuple[int, int], ...]:
        if self.hidden < dim:
            raise UserError(f"--hidden {self.hidden} holds no head of dim {dim}; give --heads, or a larger --hidden")
        return ((self.hidden // dim, self.hidden // dim),)

    def _of_tokens(self, seq: int) -> tuple[int, ...]:
        if self.tokens % seq:
            raise UserError(f"--seq {seq} does not divide --tokens {self.tokens}; give --batch, or other --tokens")
        return (self.tokens // seq,)


def tune(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            autocompletion=completion.specs,
            help="The spec or module to tune; with --measure, all modules to compare.",
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Search nothing: compare committed modules, problem by problem.")
    ] = False,
    space: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Search space (default: specs/tuning/NAME.yaml, or of a spec it extends)."),
    ] = None,
    seq: Annotated[
        str, typer.Option(metavar="LENGTHS", help="Sequence lengths, 512,1024; 1x4096: one query, 4096 keys.")
    ] = SEQ_LENS,
    tokens: Annotated[int, typer.Option(min=1, help="Batch x sequence length.")] = 16384,
    hidden: Annotated[int, typer.Option(min=1, help="Heads x head dim; rounded down to whole heads.")] = 2048,
    batch: Annotated[str | None, typer.Option(metavar="LIST", help="Batches, 1,2, instead of --tokens.")] = None,
    heads: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Heads, 16,32/8 (32 of q on 8 of k and v), instead of --hidden."),
    ] = None,
    peers: Annotated[bool, typer.Option(help="Measure torch SDPA and FlashAttention beside the finalists.")] = True,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of the last heat (25; --measure: 11).")] = None,
    burst: Annotated[
        float, typer.Option(metavar="MS", min=0.01, help="Milliseconds that the launches of one timing fill.")
    ] = BURST_MS,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="Start no new heat after this: 300s, 5m. Run again to go on.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Modules compiled at once (default: one per CPU).")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh/--resume", help="Forget what an earlier run of the same search has measured.")
    ] = False,
    work: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep candidates and journal here (default: the cache).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Enumerate and prune, and stop. Needs no GPU.")] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Write winners to specs/ and generated/, and the records of all cells.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Stem of the winner's spec (default: NAME or NAME_tuned).")] = None,
    force: Annotated[bool, typer.Option("--force", help="With --write: overwrite the spec of that name.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the records here as well.")] = None,
    write_table: Annotated[
        bool, typer.Option("--write-table", help="Make fa3gen/dispatch.yaml anew from all records.")
    ] = False,
) -> None:
    """Find the fastest module for given shapes on the Hopper GPUs of this host.

    Candidates of the search space are pruned by the rules, compiled, checked against float64 attention and measured in
    interleaved rounds; a winner has to beat the present module by more than the noise. Interrupt it at any time and
    run it again: it goes on where it was.

    Modules for packed sequences and pages are compared with --measure only, at lists of lengths and heads of their own,
    beside all others that serve the same calls.
    """
    from fa3gen.design.workspace import Workspace

    workspace = Workspace.find()
    if not names:
        if not write_table:
            raise UserError("name a spec or module to tune, such as `fa3gen tune k6_d128_causal`; see `--help`")
        _write_table(workspace)
        return
    if measure:
        _refuse_idle({"--space": space, "--name": name, "--dry-run": dry_run, "--force": force})
        if packed := _packed_among(workspace, names):
            dense = {"--seq": seq != SEQ_LENS, "--batch": batch, "--heads": heads, "--budget": budget, "--work": work}
            packed_speeds.refuse(dense | {"--fresh": fresh})
            packed_speeds.record(
                workspace,
                packed,
                rounds=rounds,
                burst_ms=burst,
                jobs=jobs,
                write=write,
                json_path=json_path,
                say=lambda text: typer.echo(text, err=True),
            )
            if write_table:
                _write_table(workspace)
            return
    else:
        names = [_tuned_name(workspace, given, write=write) for given in names]
    run = _Run(
        workspace=workspace,
        shapes=Shapes(parse_lengths(seq), tokens, hidden, parse_batches(batch), parse_heads(heads)),
        peers=peers,
        rounds=rounds,
        burst_ms=burst,
        budget_s=None if budget is None else parse_duration(budget),
        jobs=jobs,
        fresh=fresh,
        work=work,
    )
    searches = [] if measure else run.enumerate(names, space)
    if dry_run:
        return
    if write:
        _check_names(workspace, _base_name(workspace, names[0], name), searches, force=force)
    outcomes = run.search(searches) if searches else run.measure(names)
    records = _show(run, outcomes)
    if write:
        base = _base_name(workspace, names[0], name)
        records = _write_winners(workspace, records, searches, base, force=force)
        _save(workspace, records)
    if json_path is not None:
        _write_json(records, json_path)
    if write_table:
        _write_table(workspace)
    if len(records) < len(outcomes):
        raise typer.Exit(1)


def _tuned_name(workspace: Workspace, given: str, *, write: bool) -> str:
    """What is tuned, by stem; or by its path, where that is a spec outside specs/, from which no winner is written."""
    from fa3gen.measure.tuning.candidates import known

    if not given.endswith((".yaml", ".yml")):
        return given
    if not any(workspace.home_of(variant).loose for variant in known(workspace, given)):
        return Path(given).stem
    if write:
        folder = workspace.shown(workspace.specs_dir)
        raise UserError(f"--write puts winners into {folder}/, where they extend what was tuned; move {given} there")
    return given


def _packed_among(workspace: Workspace, names: Sequence[str]) -> list[Variant[Forward]]:
    """The named modules, where all are for packed sequences or pages; none, where all are for dense tensors.

    Raises UserError where there are some of either.
    """
    from fa3gen.spec.specfile import attention_only

    variants = attention_only(workspace.select(names), "fa3gen tune")
    packed = [variant for variant in variants if packed_speeds.is_packed(variant)]
    if packed and len(packed) < len(variants):
        stems = ", ".join(variant.stem for variant in packed)
        raise UserError(
            f"{stems}: modules for packed sequences are measured at lists of lengths, others at --seq; name them in "
            "two commands"
        )
    return packed


def _refuse_idle(options: Mapping[str, object]) -> None:
    """Refuse options that would do nothing, which their user cannot have meant."""
    given = [name for name, value in options.items() if value]
    if given:
        raise UserError(f"{' and '.join(given)} is for a search, and --measure searches nothing; take one of them out")


def parse_lengths(text: str) -> tuple[tuple[int, int], ...]:
    """`512,1x4096` as ((512, 512), (1, 4096)); UserError for anything else."""
    lengths = []
    for word in text.split(","):
        parts = word.strip().split("x")
        if len(parts) > 2 or not all(map(_counts, parts)):
            raise UserError(
                f"--seq {text}: '{word}' is no length; write 512,1024, or 1x4096 for one query and 4096 keys"
            )
        lengths.append((int(parts[0]), int(parts[-1])))
    return tuple(dict.fromkeys(lengths))


def parse_batches(text: str | None) -> tuple[int, ...]:
    """`1,2` as (1, 2), nothing as (); UserError for anything else."""
    words = [word.strip() for word in text.split(",")] if text is not None else []
    for word in words:
        if not _counts(word):
            raise UserError(f"--batch {text}: '{word}' is no number of sequences; write 1,2")
    return tuple(dict.fromkeys(map(int, words)))


def parse_heads(text: str | None) -> tuple[tuple[int, int], ...]:
    """`16,32/8` as ((16, 16), (32, 8)), nothing as (); UserError for anything else."""
    heads = []
    for word in text.split(",") if text is not None else []:
        parts = word.strip().split("/")
        if len(parts) > 2 or not all(map(_counts, parts)):
            raise UserError(f"--heads {text}: '{word}' is no number of heads; write 16, or 32/8 for 8 of k and v")
        heads_q, heads_kv = int(parts[0]), int(parts[-1])
        if heads_q % heads_kv:
            raise UserError(f"--heads {text}: {heads_q} query heads are no multiple of {heads_kv} of k and v")
        heads.append((heads_q, heads_kv))
    return tuple(dict.fromkeys(heads))


def _counts(word: str) -> bool:
    return word.isdecimal() and int(word) > 0


def parse_duration(text: str) -> float:
    """`300`, `300s`, `5m` or `1h` in seconds; UserError for anything else."""
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        seconds = float(number) * units[unit]
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"--budget {text}: write seconds or minutes, such as 300s or 5m")
    return seconds


@dataclass
class _Run:
    """One call of the command."""

    workspace: Workspace
    shapes: Shapes
    peers: bool
    rounds: int | None
    burst_ms: float
    budget_s: float | None
    jobs: int | None
    fresh: bool
    work: Path | None

    def __post_init__(self) -> None:
        from rich.console import Console

        self.errors = Console(stderr=True)

    def say(self, text: str) -> None:
        """One line on standard error."""
        self.errors.print(text, markup=False, highlight=False, soft_wrap=True)

    def measure(self, names: Sequence[str]) -> list[Outcome]:
        """Compare committed modules in every cell of their problems."""
        from fa3gen.design.family import Family
        from fa3gen.measure.tuning.candidates import committed_module
        from fa3gen.measure.tuning.heats import MEASURE_ROUNDS, single
        from fa3gen.spec.specfile import dense_only

        families: dict[Family, list[Module]] = {}
        for variant in dense_only(self.workspace.select(names), "fa3gen tune"):
            families.setdefault(Family.of(variant.spec).of_call(), []).append(committed_module(self.workspace, variant))
        rounds = self.rounds or MEASURE_ROUNDS
        for modules in families.values():
            single(len(modules), rounds)  # refuses too few rounds before anything takes time
        return self._compete(families, lambda count: single(count, rounds))

    # -- searching

    def enumerate(self, names: Sequence[str], space_path: Path | None) -> list[Search]:
        """Enumerate and prune; says what was pruned and why. UserError where nothing is left."""
        from fa3gen.design.family import Family
        from fa3gen.measure.tuning.candidates import find_space, find_starts, known, prune
        from fa3gen.records.tuning_records import refuse_untuned

        if len(names) > 1:
            raise UserError(f"one name is tuned at a time, not {len(names)}; to compare modules, add --measure")
        for variant in filter(packed_speeds.is_packed, known(self.workspace, names[0])):
            refuse_untuned(Family.of(variant.spec).of_call())
        space = find_space(self.workspace, names[0], space_path)
        starts = find_starts(self.workspace, names[0], space)
        searches = []
        for start in starts:
            self.shapes.problems(start.family)  # refuses shapes before anything takes time
            search = prune(space, start)
            self._say_pruned(search)
            searches.append(search)
        return searches

    def _say_pruned(self, search: Search) -> None:
        enumeration = search.enumeration
        text = f"{search.start.family.label}: {enumeration.total} combinations, {len(enumeration.candidates)} legal"
        self.say(text + (f", {enumeration.repeated} repeated" if enumeration.repeated else ""))
        for reason in enumeration.pruned:
            self.say(f"  {reason.count:5} refused: {reason.field}: {reason.example}")
        for reason in enumeration.warned:
            self.say(f"  {reason.count:5} tried, but not advisable: {reason.field}: {reason.example}")

    def search(self, searches: list[Search]) -> list[Outcome]:
        """Render all candidates and run their heats; `searches` get their modules."""
        from fa3gen.measure.tuning.candidates import render_search
        from fa3gen.measure.tuning.heats import FINAL_ROUNDS, FINALISTS, plan, single

        final = self.rounds or FINAL_ROUNDS
        single(FINALISTS + 1, final)  # refuses too few rounds
        find_gpus()  # or none, before rendering takes its seconds
        folder = self._root() / "modules"
        searches[:] = [render_search(self.workspace, s, folder / s.start.family.label) for s in searches]
        families = {search.start.family: list(search.modules) for search in searches}
        return self._compete(families, lambda count: plan(count - 1, final))

    def _count(self, total: int) -> Callable[[str, str], None]:
        done = 0

        def say(stem: str, reason: str) -> None:
            nonlocal done
            done += 1
            self.say(f"[{done}/{total}] compiled {stem}" + (f": dropped: {reason}" if reason else ""))

        return say

    # -- both

    def _root(self) -> Path:
        return self.work or work_directory()

    def _folder(self, families: Mapping[Family, Sequence[Module]]) -> Path:
        """Where this run keeps its journal: named by what is compared at which shapes, by GPU and versions."""
        from dataclasses import asdict

        from fa3gen.run import gpu

        if self.work is not None:
            return self.work
        stems = sorted(module.stem for modules in families.values() for module in modules)
        facts = {"stems": stems, "shapes": asdict(self.shapes), "around": asdict(gpu.environment())}
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return self._root() / digest[:16]

    def _compete(
        self, families: Mapping[Family, Sequence[Module]], heats_for: Callable[[int], list[Heat]]
    ) -> list[Outcome]:
        """Compile all modules, then run the heats of every cell; `heats_for` plans them for a number of modules."""
        from fa3gen.measure.tuning.candidates import compile_all
        from fa3gen.measure.tuning.journal import Journal
        from fa3gen.measure.tuning.session import Cell

        problems = {family: self.shapes.problems(family) for family in families}
        gpus, folder = find_gpus(), self._folder(families)
        journal = Journal(folder / "journal.jsonl", fresh=self.fresh)
        self.say(f"journal: {journal.path}")
        everyone = [module for modules in families.values() for module in modules]
        try:
            dropped = compile_all(everyone, journal, self.jobs, self._count(len(everyone)))
            cells = []
            for family, modules in families.items():
                left = tuple(module for module in modules if module.stem not in dropped)
                if left:
                    cells += [Cell(problem, left, tuple(heats_for(len(left)))) for problem in problems[family]]
            if not cells:
                raise UserError("no module compiles as planned; the reasons stand above")
            self.say(f"{len(cells)} cells, {len(everyone) - len(dropped)} modules, {len(gpus)} GPUs")
            return self._run(cells, gpus, journal, folder)
        except KeyboardInterrupt:
            self.say("stopped; run the same command again to go on where it was")
            raise
        finally:
            journal.close()

    def _run(self, cells: Sequence[Cell], gpus: Sequence[str], journal: Journal, folder: Path) -> list[Outcome]:
        from fa3gen.compile import compiler
        from fa3gen.measure.tuning import session

        with self.errors.status("measuring") as status:
            tuner = session.Tuner(
                cells=cells,
                journal=journal,
                gpus=gpus,
                logs=folder,
                peers=self.peers,
                burst_ms=self.burst_ms,
                jobs=self.jobs or compiler.usable_cpus(),
                budget_s=self.budget_s,
                command=session.COMMAND,
                say=self.say,
                on_event=status.update if self.errors.is_terminal else lambda text: None,
            )
            return tuner.run()


def work_directory() -> Path:
    """Where candidates and journals are kept: below $FA3GEN_CACHE_DIR, else in the user's cache directory."""
    import platformdirs

    from fa3gen.compile.cache import CACHE_DIR_VARIABLE

    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    return (Path(chosen) if chosen else platformdirs.user_cache_path("fa3gen")) / "tuning"


def find_gpus() -> list[str]:
    """The Hopper GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; UserError without any."""
    from fa3gen.run import gpu

    if (missing := gpu.why_no_hopper()) is not None:
        raise UserError(
            f"fa3gen tune needs a Hopper GPU (H100, H200, GH200): {missing}. Without one, `--dry-run` shows what "
            "would be tried"
        )
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    names = [word.strip() for word in given.split(",")][:count] if given else [str(index) for index in range(count)]
    return [name for index, name in enumerate(names) if torch.cuda.get_device_capability(index) == gpu.HOPPER]


# -- results


def _console() -> Console:
    import sys

    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)


def _show(run: _Run, outcomes: Sequence[Outcome]) -> list[TuningRecord]:
    """Print the table, the summary and what is missing; return the records of the finished cells."""
    from fa3gen.measure.tuning import report

    records = [record for outcome in outcomes if (record := outcome.record()) is not None]
    console = _console()
    if records:
        console.print(report.table(records))
    if text := report.summary(records):
        console.print(text, markup=False, highlight=False)
    finished = [outcome for outcome in outcomes if outcome.times]
    for note in report.notes(finished):
        console.print(note, style="dim", markup=False, highlight=False)
    if len(records) < len(outcomes):
        left = len(outcomes) - len(records)
        run.say(f"{left} of {len(outcomes)} cells have no winner; where the budget is spent, run the command again")
    return records


def _save(workspace: Workspace, records: Sequence[TuningRecord]) -> None:
    from fa3gen.records import tuning_records

    for path in tuning_records.save(workspace, records):
        typer.echo(f"wrote {workspace.shown(path)}", err=True)


def _write_json(records: Sequence[TuningRecord], path: Path) -> None:
    from fa3gen.base.files import write_text
    from fa3gen.records import tuning_records

    write_text(path, tuning_records.dumps(records))
    typer.echo(f"wrote {path}", err=True)


def _base_name(workspace: Workspace, tuned: str, name: str | None) -> str:
    """The stem of the winner's spec: what --name says, else what was tuned, if that is no module yet."""
    from fa3gen.measure.tuning.candidates import known

    return name or (f"{tuned}_tuned" if known(workspace, tuned) else tuned)


def _check_names(workspace: Workspace, base: str, searches: Sequence[Search], *, force: bool) -> None:
    """Refuse a name that cannot be written before the time is spent; later ones carry a suffix."""
    from fa3gen.measure.tuning.writeback import check_name

    for search in searches:
        check_name(workspace, _family_name(base, search, searches), force=force)


def _family_name(base: str, search: Search, searches: Sequence[Search]) -> str:
    return base if len(searches) == 1 else f"{base}_{search.start.family.label}"


def _write_winners(
    workspace: Workspace, records: Sequence[TuningRecord], searches: Sequence[Search], base: str, *, force: bool
) -> list[TuningRecord]:
    """Write every winner that is not committed; return the records with the committed stems in place of candidates'.

    The winner of most cells gets the plain name, any other one that of the shortest keys it won at: NAME_k512, and
    NAME_k512_2 where that is taken by another one.
    """
    from fa3gen.measure.tuning.writeback import check_name, write_winner

    named: dict[str, tuple[str, Search]] = {}
    for search in searches:
        candidates = {module.stem for module in search.modules[1:]}
        won = [r for r in records if r.problem.family == search.start.family and r.winner in candidates]
        counts = Counter(record.winner for record in won)
        for rank, (stem, _) in enumerate(counts.most_common()):
            shortest = min(record.problem.seq_k for record in won if record.winner == stem)
            name = _family_name(base, search, searches) + (f"_k{shortest}" if rank else "")
            taken = {taken for taken, _ in named.values()}
            named[stem] = f"{name}_{rank}" if name in taken else name, search
    for name, _ in named.values():
        check_name(workspace, name, force=force)
    committed: dict[str, Module] = {}
    for stem, (name, search) in named.items():
        measured = next(module for module in search.modules if module.stem == stem)
        summary = _summary(search, [record for record in records if record.winner == stem])
        committed[stem] = write_winner(workspace, name, search.start.base, measured, summary)
        typer.echo(f"wrote specs/{name}.yaml and {workspace.shown(committed[stem].path)}", err=True)
        typer.echo(f"next: fa3gen verify {name} --evidence", err=True)
    return [_renamed(record, committed) for record in records]


def _summary(search: Search, won: Sequence[TuningRecord]) -> str:
    """One line for the spec: for which shapes and on which GPU it won."""
    lengths = ", ".join(dict.fromkeys(record.problem.lengths for record in won))
    return f"Tuned from {search.start.incumbent.stem} for {lengths} on {won[0].gpu}"


def _renamed(record: TuningRecord, committed: dict[str, Module]) -> TuningRecord:
    """The same record, naming committed modules: their code is what was measured, their header is not."""
    document = record.model_dump()
    for result in document["results"]:
        if (module := committed.get(result["stem"])) is not None:
            result["stem"], result["sha256"] = module.stem, module.sha256
    if record.winner in committed:
        document["winner"] = committed[record.winner].stem
    return type(record).model_validate(document)


def _write_table(workspace: Workspace) -> None:
    """Make the dispatch table of all records."""
    from fa3gen.base.files import write_text
    from fa3gen.records import dispatch_table, tuning_records
    from fa3gen.run.dispatch import Table, table_path

    records = dispatch_table.records_of(workspace)
    if not records:
        folder = workspace.shown(tuning_records.directory(workspace))
        raise UserError(f"there are no records in {folder}; make some with `fa3gen tune --measure MODULE... --write`")
    rows = dispatch_table.rows_from_records(records)
    path = table_path(workspace)
    write_text(path, dispatch_table.table_text(Table(rows=rows)))
    typer.echo(f"wrote {workspace.shown(path)}: {counted(len(rows), 'row')}{_shares(records, rows)}", err=True)


def _shares(records: Sequence[Record], rows: Sequence[Row]) -> str:
    """`; in 3007 records they choose 0.995 of the fastest, geometric mean; least 0.53: bf16 d64 causal ...`.

    Nothing where rows serve none of the records: modules that write no LSE have no rows.
    """
    from fa3gen.records.dispatch_table import shares

    timed = [(each.share, each.record.problem.label) for each in shares(records, rows) if each.share is not None]
    if not timed:
        return ""
    mean, (least, label) = statistics.geometric_mean(share for share, _ in timed), min(timed)
    many = counted(len(timed), "record")
    return f"; in {many} they choose {mean:.3f} of the fastest, geometric mean; least {least:.2f}: {label}"
