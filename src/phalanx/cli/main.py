"""The command line: commands and exit codes. Each command is a module.

A command's module is imported when it is called, so that `phalanx --help` imports neither torch nor pydantic. Errors
become exit codes only here.
"""

import os
import select
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from typing import Annotated, Any, TextIO, cast

import typer
from typer.core import TyperCommand, TyperGroup

from phalanx.cli.options import BackendOptionsCommand
from phalanx.errors import (
    DISK_FULL_ERRNOS,
    RETRYABLE_STORAGE_ERRNOS,
    STORAGE_BROKEN_ERRNOS,
    ExitCode,
    PhalanxError,
    SubprocessError,
    UsageError,
    describe_os_error,
)
from phalanx.std_streams import PrintableStream, escape_control_chars

__all__ = ["main"]

_COMMAND_MODULES = {
    "train": ("phalanx.cli.train:train", "Train a recipe, or resume a run."),
    "tune": ("phalanx.cli.tune:tune", "Measure what makes a recipe faster on this machine; write the tuned recipe."),
    "calibrate": ("phalanx.cli.calibrate:calibrate", "Measure this machine; write a cluster file."),
    "doctor": ("phalanx.cli.doctor:doctor", "Check whether this machine is fit to train."),
    "plan": ("phalanx.cli.plan:plan", "Predict a run on a cluster, and choose its parallelism."),
    "report": ("phalanx.cli.report:report", "Report what a run did and where its time went."),
    "compare": ("phalanx.cli.report:compare", "Compare runs: recipes, loss, speed."),
    "generate": ("phalanx.cli.generate:generate", "Generate text from a run's checkpoint."),
    "chat": ("phalanx.cli.generate:chat", "Talk with a trained model in the terminal."),
    "evaluate": ("phalanx.cli.evaluate:evaluate", "Evaluate a run's checkpoint on the validation set."),
    "profile": ("phalanx.cli.profile:profile", "Profile a few training steps."),
    "jobs": ("phalanx.cli.jobs:app", "Submit, list, follow and cancel jobs, locally or on a cluster."),
    "serve": ("phalanx.cli.serve:serve", "Serve a live page of runs and jobs."),
    "data": ("phalanx.cli.data:app", "Prepare, verify and inspect training data."),
    "checkpoint": ("phalanx.cli.checkpoint:app", "List, verify, digest and export checkpoints."),
    "chaos": ("phalanx.cli.chaos:chaos", "Train under injected faults, and check that the weights are bit-identical."),
    "recipe": ("phalanx.cli.recipe:app", "Check a recipe; print the JSON Schema for editors."),
}
"""Every command, its module, and its line in `phalanx --help`."""
_FLEET_COMMANDS = ("nodes", "power", "thermal", "simulate")
"""Commands of phalanx-fleet, which is a package of its own."""

# what the parser raises for wrong usage; its public name differs between versions of typer
_ParserError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


class _CommandGroup(TyperGroup):
    """A group that lists its commands without importing them."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _COMMAND_MODULES:
            return _load_command(cmd_name, _COMMAND_MODULES[cmd_name][0])
        added = _find_added_commands()
        if cmd_name in added:
            return _load_command(cmd_name, added[cmd_name][0])
        if cmd_name in _FLEET_COMMANDS:
            raise UsageError(f"`phalanx {cmd_name}` is in the package phalanx-fleet: pip install phalanx-fleet")
        return None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        lines = {**_COMMAND_MODULES, **_find_added_commands()}
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in lines.items()])


def _find_added_commands() -> dict[str, tuple[str, str]]:
    """Commands of installed packages with an entry point `phalanx.commands`: a table like `_COMMAND_MODULES`."""
    from importlib.metadata import entry_points  # looks at every installed package: 30 ms with 200 of them

    added: dict[str, tuple[str, str]] = {}
    for entry_point in entry_points(group="phalanx.commands"):
        added |= entry_point.load()
    return added


def _load_command(name: str, address: str) -> Any:
    """Import a command, or a group of commands."""
    module, _, attribute = address.partition(":")
    verb = getattr(import_module(module), attribute)
    if isinstance(verb, typer.Typer):
        verb.info.name = name
        verb.rich_markup_mode = None
        return typer.main.get_group(verb)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, cls=BackendOptionsCommand)(verb)
    return typer.main.get_command(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        import phalanx

        print(f"phalanx {phalanx.__version__}")
        raise typer.Exit


def _make_app() -> TyperGroup:
    app = typer.Typer(
        cls=_CommandGroup,
        add_completion=False,
        rich_markup_mode=None,  # rich takes longer to import than everything else here
        help="Train deep-learning models on one machine or many.",
        epilog="Run `phalanx COMMAND --help` for the options of a command. Exit codes: 0 done, 64 wrong usage, 65 bad "
        "data, 75 not finished (start again), 77 unfit node, 78 bad recipe, 93 no progress.",
    )

    @app.callback()
    def frame(
        version: Annotated[
            bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
        ] = False,
        log_level: Annotated[
            str | None,
            typer.Option(
                metavar="LEVEL",
                help="Log records to show on standard error: debug, info, warning or error. Also as PHALANX_LOG.",
                show_default="warning",
            ),
        ] = None,
    ) -> None:
        from phalanx.logging_config import configure_logging  # logging is not needed for --help

        configure_logging(log_level)

    group = typer.main.get_group(app)
    for name, (_, line) in _COMMAND_MODULES.items():
        # only for suggestions: `trian` -> `train`
        group.add_command(TyperCommand(name=name, help=line))
    return group


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Bugs propagate as exceptions, with their traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with redirect_stdout(cast(TextIO, PrintableStream(sys.stdout))):
            code = _run_command(arguments or ["--help"])
        sys.stdout.flush()
        return code
    except PhalanxError as error:
        _print_error(str(error))
        return int(error.code)
    except SubprocessError as error:
        print(escape_control_chars(f"{error.traceback or ''}error: {error}"), file=sys.stderr)
        return 1 if error.traceback else int(error.code)
    except (KeyboardInterrupt, typer.Abort):
        _print_error("interrupted")
        return int(ExitCode.UNFINISHED)
    except BrokenPipeError:
        if not _is_reader_gone():
            raise
        _discard_output()
        return int(ExitCode.UNFINISHED)
    except OSError as error:
        if error.filename is None and (why := _explain_unnamed_error(error)) is not None:
            message, ended = why
            _print_error(message)
            _discard_output()
            return int(ended)
        if error.errno in RETRYABLE_STORAGE_ERRNOS:  # the storage may be available again at the next start
            _print_error(f"storage fails: {describe_os_error(error)}")
            return int(ExitCode.UNFINISHED)
        if error.filename is None:
            raise
        # a missing directory, missing permissions, a full disk: the user can fix these
        _print_error(describe_os_error(error))
        return int(ExitCode.USAGE)
    except MemoryError as error:
        _print_error(f"out of memory: {error}" if str(error) else "out of memory")
        return int(ExitCode.USAGE)
    except OverflowError as error:
        _print_error(f"a number is too large: {error}")
        return int(ExitCode.USAGE)


def _print_error(what: str) -> None:
    print(f"error: {escape_control_chars(what)}", file=sys.stderr)


def _run_command(arguments: list[str]) -> int:
    """Parse and call. typer's own `main` would turn broken pipes and interrupts into other exit codes."""
    group = _make_app()
    try:
        with group.make_context("phalanx", arguments) as context:
            result = group.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except _ParserError as error:
        message = error.format_message()
        # for a group without a command, such as `phalanx data`, the message is its help
        if message.startswith("Usage:"):
            print(message, file=sys.stderr)
        else:
            _print_error(f"{message}{_usage_hint(error)}")
        return int(ExitCode.USAGE)
    return result if isinstance(result, int) else int(ExitCode.DONE)


def _usage_hint(error: Exception) -> str:
    """Name the command that prints the usage, and say how recipe keys are written when an option is unknown."""
    context = getattr(error, "ctx", None)
    if context is None:
        return ""
    takes_overrides = any("KEY=VALUE" in (param.metavar or "") for param in context.command.params if param.nargs == -1)
    is_unknown_option = takes_overrides and hasattr(error, "possibilities")
    keys = "\nRecipe keys are written without dashes, such as steps=50" if is_unknown_option else ""
    return f"{keys}\nSee `{context.command_path} --help`"


def _explain_unnamed_error(error: OSError) -> tuple[str, ExitCode] | None:
    """Explain an error without a file name that comes from the working directory or standard output."""
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the working directory does not exist any more; change to another and try again", ExitCode.USAGE
    if error.errno in DISK_FULL_ERRNOS | STORAGE_BROKEN_ERRNOS:
        return f"the output cannot be written: {error.strerror}", ExitCode.UNFINISHED
    return None


def _discard_output() -> None:
    """Discard buffered output, which would fail again when Python flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_reader_gone() -> bool:
    """Return whether the reader of standard output has closed it, as `| head` does."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
