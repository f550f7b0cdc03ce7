"""Write the reference pages that come from the code: `python tools/reference.py` (part of `make docs`).

In docs/reference: cli.md from the command line's own parser, python.md from docstrings, recipe.md from the schema,
events.md from the dataclasses. In fleet/docs/reference: cli.md of what phalanx-fleet adds. A test fails when one of
them is stale.
"""

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from recipe_reference import render_recipe_reference

from phalanx.cli.main import _make_app
from phalanx.cli.serve import make_serve_command
from phalanx.errors import ExitCode
from phalanx.jobs.backends.base import OPTION_CLASSES, list_option_help
from phalanx.run import event_types
from phalanx.run.events import EVENT_TYPES

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
FLEET_FOLDER = ROOT / "fleet" / "docs" / "reference"
MADE_BY = "This page is made from the code by `make docs`."

PYTHON_API = (
    (
        "Use cases",
        (
            "phalanx.app.train:train",
            "phalanx.app.plan:plan",
            "phalanx.app.job_handle:submit",
            "phalanx.app.session:session",
        ),
    ),
    ("Values", ("phalanx.recipe:Recipe", "phalanx.run:Run", "phalanx.app.job_handle:JobHandle")),
    ("A training loop of your own", ("phalanx.train.session:Session",)),
    (
        "Tasks and callbacks",
        ("phalanx.train.tasks:Task", "phalanx.train.callbacks", "phalanx.train.callbacks:RunContext"),
    ),
    ("Errors", ("phalanx.errors:PhalanxError", "phalanx.errors:UsageError", "phalanx.errors:RecipeError")),
)
"""Sections of python.md: `module:name`, or a module whose docstring is the text."""
SHOWN_AS = {
    "phalanx.app.train:train": "phalanx.train",
    "phalanx.app.plan:plan": "phalanx.plan",
    "phalanx.app.session:session": "phalanx.session",
    "phalanx.app.job_handle:submit": "phalanx.submit",
    "phalanx.app.job_handle:JobHandle": "phalanx.JobHandle",
    "phalanx.recipe:Recipe": "phalanx.Recipe",
    "phalanx.run:Run": "phalanx.Run",
}
"""Names under which people import what lives elsewhere."""
METHODS = {
    "phalanx.app.job_handle:JobHandle": ("status", "wait", "logs", "cancel", "result"),
    "phalanx.run:Run": ("read_json", "describe_damage"),
    "phalanx.train.session:Session": (
        "prepare",
        "micro_batches",
        "backward",
        "step",
        "backward_and_step",
        "send_heartbeat",
    ),
    "phalanx.train.tasks:Task": ("inputs", "loss"),
}
"""Methods that are shown of a class; of others none."""


def cli_page() -> str:
    """Return cli.md: each command with its usage, arguments and options."""
    root: Any = _make_app()
    context = root.make_context("phalanx", [], resilient_parsing=True)
    parts = [f"# Command line\n\n{MADE_BY} `--help` of each command prints the same.\n"]
    parts.append("```text\nphalanx [OPTIONS] COMMAND\n```\n")
    parts += _option_table(root, context)
    parts += _commands(root, context, "phalanx")
    parts += _backend_options()
    rows = [f"| {int(code)} | `{code.name}` |" for code in ExitCode]
    parts.append("\n".join(["## Exit codes\n", "| code | name |", "|---:|---|", *rows]) + "\n")
    parts.append("What to do about each: [exit codes and signals](exit-codes.md).\n")
    return "\n".join(parts)


def fleet_cli_page() -> str:
    """Return cli.md of phalanx-fleet: its commands, and its options of `phalanx serve`."""
    from phalanx_fleet.commands import COMMANDS
    from phalanx_fleet.pages import make_pages

    root: Any = _make_app()
    context = root.make_context("phalanx", [], resilient_parsing=True)
    parts = [f"# Command line\n\n{MADE_BY} `--help` of each command prints the same.\n"]
    parts += _commands(root, context, "phalanx", list(COMMANDS))
    own, command = _serve_command(()), _serve_command((make_pages,))
    command.params = command.params[len(own.params) :]
    parts.append("## Options of phalanx serve\n")
    parts += _option_table(command, command.make_context("serve", [], resilient_parsing=True))
    return "\n".join(parts)


def _commands(group: Any, context: Any, path: str, names: list[str] | None = None) -> Iterator[str]:
    for name in names or group.list_commands(context) or []:
        command = _serve_command(()) if name == "serve" else group.get_command(context, name)
        if command.hidden:
            continue
        below = command.make_context(name, [], parent=context, resilient_parsing=True)
        full = f"{path} {name}"
        text = inspect.cleandoc(command.help or "")
        if hasattr(command, "list_commands"):
            yield f"## {full}\n\n{text}\n"
            yield from _commands(command, below, full)
            continue
        usage = " ".join([full, *command.collect_usage_pieces(below)])
        level = "##" if path == "phalanx" else "###"
        yield f"{level} {full}\n\n```text\n{usage}\n```\n\n{text}\n"
        yield from _option_table(command, below)


def _serve_command(makers: tuple[Any, ...]) -> Any:
    """`phalanx serve` with the options of these pages only, whatever is installed."""
    app = typer.Typer()
    app.command("serve")(make_serve_command(makers))
    return typer.main.get_command(app)


def _backend_options() -> Iterator[str]:
    yield "## Backend options\n"
    yield "`phalanx train --on BACKEND` and `phalanx jobs submit --on BACKEND` take these as `-o`.\n"
    for backend in OPTION_CLASSES:
        yield f"### Options of {backend}\n"
        rows = []
        for each in list_option_help(backend):
            default = "required" if each.is_required else _cell(each.default)
            rows.append(f"| {_code(each.name)} | {_code(each.value_type)} | {default} | {_cell(each.help)} |")
        yield "\n".join(["| option | value | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _option_table(command: Any, context: Any) -> Iterator[str]:
    records = [record for each in command.get_params(context) if (record := each.get_help_record(context))]
    rows = [f"| {_code(names)} | {_cell(meaning)} |" for names, meaning in records if "--help" not in names]
    if rows:
        yield "\n".join(["| argument or option | meaning |", "|---|---|", *rows]) + "\n"


def _cell(text: str) -> str:
    """Escape what would end a cell of a table or open a tag."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")


def _code(text: str) -> str:
    """Mark a cell of a table as code; a bar would end it, and not every reader knows how to escape one there."""
    text = " ".join(text.split())
    if "|" not in text:
        return f"`{text}`"
    return f"<code>{text.replace('&', '&amp;').replace('<', '&lt;').replace('|', '&#124;')}</code>"


def python_page() -> str:
    """Return python.md: signatures and docstrings of the public API."""
    parts = [
        f"# Python API\n\n{MADE_BY} `import phalanx` is fast: `phalanx.train`, `phalanx.plan`, `phalanx.submit`, "
        "`phalanx.session`, `phalanx.Recipe` and `phalanx.Run` are imported when they are first used.\n"
    ]
    for title, names in PYTHON_API:
        parts.append(f"## {title}\n")
        for name in names:
            parts += _described(name)
    return "\n".join(parts)


def _described(name: str) -> Iterator[str]:
    module, _, attribute = name.partition(":")
    if not attribute:
        yield f"### {module}\n\n{_docstring(import_module(module))}\n"
        return
    thing = getattr(import_module(module), attribute)
    shown = SHOWN_AS.get(name, f"{module}.{attribute}")
    yield f"### {shown}\n"
    if not inspect.isclass(thing):
        yield _signature(shown.rpartition(".")[2], thing)
        yield f"{_docstring(thing)}\n"
        return
    yield f"{_docstring(thing)}\n"
    if dataclasses.is_dataclass(thing):
        yield "\n".join(_fields(thing)) + "\n"
    for key in METHODS.get(name, ()):
        member = getattr(thing, key)
        yield f"#### {attribute}.{key}\n"
        yield _signature(key, member)
        yield f"{_docstring(member)}\n"


def _docstring(thing: Any) -> str:
    """Return a docstring with its Args, Returns and Raises as lists."""
    lines, section = list[str](), False
    for line in (inspect.getdoc(thing) or "").splitlines():
        if line in ("Args:", "Returns:", "Raises:"):
            section = True
            lines += [line, ""]
        elif section and (match := re.match(r"    (\w+): (.*)", line)):
            lines.append(f"- `{match[1]}`: {match[2]}")
        else:
            section = section and (line.startswith(" ") or not line)
            lines.append(line.removeprefix("      ") if section else line)
    return "\n".join(lines)


def _signature(name: str, function: Callable[..., Any]) -> str:
    """Return the call of a function as a block, one parameter a line where it is long."""
    signature = inspect.signature(function)
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    texts = [_parameter(each) for each in parameters]
    keyword_only = [each.kind is each.KEYWORD_ONLY for each in parameters]
    if any(keyword_only):
        texts.insert(keyword_only.index(True), "*")
    returns = signature.return_annotation
    arrow = "" if returns in (signature.empty, None) else f" -> {_annotation(returns)}"
    line = f"{name}({', '.join(texts)}){arrow}"
    if len(line) > 100:
        line = "\n".join([f"{name}(", *(f"    {each}," for each in texts), f"){arrow}"])
    return f"```text\n{line}\n```\n"


def _parameter(parameter: inspect.Parameter) -> str:
    annotation = "" if parameter.annotation is parameter.empty else f": {_annotation(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return f"{parameter.name}{annotation}"
    default = getattr(parameter.default, "__name__", None) or repr(
        parameter.default
    )  # repr of a function has an address
    return f"{parameter.name}{annotation} = {default}"


def _annotation(annotation: Any) -> str:
    """Return a type in words: without modules, and with `Event` for the union of all events."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = text.replace(inspect.formatannotation(event_types.Event), "Event")
    text = re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)
    text = re.sub(r"Optional\[(.*)\]$", r"\1 | None", text)
    return re.sub(r"Literal\[([^]]*)\]", lambda match: match[1].replace(", ", " or "), text)


def events_page() -> str:
    """Return events.md: one section for each kind of line in events.jsonl."""
    introduction = (inspect.getdoc(event_types) or "").partition("\n\n")[2]
    parts = [
        f"# Events\n\n{MADE_BY} Each line of a run's `events.jsonl` is one JSON object: `kind`, `time` and the fields "
        f"of its kind. The file is append-only and has one writer: "
        f"[how to read it](run-directory.md#events).\n\n{introduction}\n"
    ]
    for kind, event_type in EVENT_TYPES.items():
        parts.append(f"## {kind}\n\n{_unwrapped(event_type)}\n")
        rows = list(_fields(event_type, without=("time",)))
        parts.append("\n".join(rows) + "\n")
    parts.append(f"## Phases of a step\n\n{_unwrapped(event_types.StepPhases)}\n")
    parts.append("\n".join(_fields(event_types.StepPhases)) + "\n")
    return "\n".join(parts)


def _unwrapped(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").split())


def _fields(thing: Any, without: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a table of a dataclass's fields: name, type, default."""
    yield "| field | type | default |"
    yield "|---|---|---|"
    for each in dataclasses.fields(thing):
        if each.name in without:
            continue
        kind = _annotation(each.type).replace(" | ", " or ")
        default = "required" if each.default is dataclasses.MISSING else f"`{each.default!r}`"
        if each.default is dataclasses.MISSING and each.default_factory is not dataclasses.MISSING:
            default = "made at the time"
        yield f"| `{each.name}` | {kind} | {default} |"


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": cli_page,
    "python.md": python_page,
    "recipe.md": render_recipe_reference,
    "events.md": events_page,
}
"""How each page is made."""


def main() -> int:
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make())
    (FLEET_FOLDER / "cli.md").write_text(fleet_cli_page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
