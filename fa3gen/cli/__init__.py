"""The command line. Each command lives in a module of its own, which is imported when it is asked for.

Exit codes: 0 for success, 1 for a check that failed, 2 for a request that cannot be served as it stands.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fa3gen.base.errors import Caution, UserError

# Command -> module and function, in the order in which a user meets them.
COMMANDS = {
    "list": ("fa3gen.cli.specs", "list_specs"),
    "new": ("fa3gen.cli.specs", "new_spec"),
    "schema": ("fa3gen.cli.specs", "print_schema"),
    "render": ("fa3gen.cli.render", "render"),
    "refresh": ("fa3gen.cli.refresh", "refresh"),
    "diff": ("fa3gen.cli.diff", "diff"),
    "compile": ("fa3gen.cli.compile", "compile"),
    "verify": ("fa3gen.cli.verify", "verify"),
    "matrix": ("fa3gen.cli.matrix", "matrix"),
    "trace": ("fa3gen.cli.trace", "trace"),
    "report": ("fa3gen.cli.report", "report"),
    "bench": ("fa3gen.cli.bench", "bench"),
    "explain": ("fa3gen.cli.explain", "explain"),
    "simulate": ("fa3gen.cli.simulate", "simulate"),
    "tune": ("fa3gen.cli.tune", "tune"),
    "cache": ("fa3gen.cli.cache", "cache"),
    "doctor": ("fa3gen.cli.doctor", "doctor"),
}


class LazyCommands(TyperGroup):
    """A group that imports a command's module when the command is run, or its help is shown."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All commands, in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, or None for an unknown name; then all are loaded, for typer to suggest the nearest."""
        if cmd_name not in COMMANDS:
            self.commands.update({name: _command(name) for name in COMMANDS})
            return None
        return self.commands.setdefault(cmd_name, _command(cmd_name))


def _command(name: str) -> Any:
    module, function = COMMANDS[name]
    single = typer.Typer(add_completion=False)
    single.command(name)(getattr(importlib.import_module(module), function))
    return typer.main.get_command(single)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"fa3gen {version('fa3gen')}")
        except PackageNotFoundError:
            typer.echo("fa3gen (run from a checkout that is not installed)")
        raise typer.Exit


app = typer.Typer(cls=LazyCommands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.callback()
def _fa3gen(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Attention kernels for Hopper (sm_90a): a YAML spec in, one readable CuTe DSL module out."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on `arguments` (default: the process's own) and return the exit code."""
    if arguments is None:
        gc.set_threshold(100_000)  # a process of its own that ends soon: a tenth of the time of `render` is collecting
    try:
        with _cautions_printed():
            app(None if arguments is None else list(arguments), prog_name="fa3gen")
        sys.stdout.flush()
    except SystemExit as leaving:
        return _exit_code(leaving)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader left, which is no failure. Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        print(f"{error.filename or 'standard output'}: {error.strerror}; nothing more was done", file=sys.stderr)
        return 2
    return 0


@contextlib.contextmanager
def _cautions_printed() -> Iterator[None]:
    """Print what is for the user plainly; a line of our source, as Python adds it, says nothing to him."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", Caution)
        show = warnings.showwarning

        def plainly(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, Caution):
                print(f"warning: {message}", file=sys.stderr)
            else:
                show(message, category, *place, **more)

        warnings.showwarning = plainly
        yield


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    print(leaving.code, file=sys.stderr)
    return 1
