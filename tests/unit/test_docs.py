"""The pages say what is true: links lead somewhere, commands, recipes and snippets are what the program takes, the
tables of actions and exit codes are whole, and the first screen of the README fits. Nothing is executed."""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from phalanx.cli.main import _make_app
from phalanx.errors import ExitCode
from phalanx.recipe import load_recipe
from phalanx.run.event_types import FailureCause
from phalanx.train.step_callbacks import NonfiniteAction

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SKILL.md", "docs/llms.txt")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("fleet/**/*.md")),
]
ARCHITECTURE = ROOT / "docs" / "explanation" / "architecture.md"
FAULT_TOLERANCE = ROOT / "docs" / "explanation" / "fault-tolerance.md"
EXIT_CODES = ROOT / "docs" / "reference" / "exit-codes.md"

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`]+)`")


def blocks(*languages: str) -> list[Any]:
    """The fenced blocks of these languages on all pages, as parameters of a test."""
    return [
        pytest.param(block, id=f"{page.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}")
        for page in PAGES
        for text in [page.read_text()]
        for match in FENCE.finditer(text)
        for language, block in [match.groups()]
        if language in languages
    ]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def commands(block: str) -> Iterator[list[str]]:
    """The words behind `phalanx` in each command line of a block; of a transcript only what follows a `$`."""
    lines = block.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in lines:
        yield from calls(shlex.split(line, comments=True))


def calls(words: list[str]) -> Iterator[list[str]]:
    """What follows `phalanx` among a command's words, also within `bash -c '...'`."""
    for number, word in enumerate(words):
        if word.split("/")[-1] == "phalanx":
            rest = words[number + 1 :]
            ends = [rest.index(end) for end in ("|", "&&", ";", ">", "2>") if end in rest]
            yield rest[: min(ends, default=len(rest))]
            return
        if " phalanx " in word:
            yield from calls(shlex.split(word))


def parse(words: list[str]) -> None:
    """Have the command line's own parser read the words; it raises what a user would be told."""
    command: Any = _make_app()
    context = command.make_context("phalanx", list(words), resilient_parsing=True)
    while words and hasattr(command, "get_command"):
        verb, *words = words
        found = command.get_command(context, verb)
        assert found is not None, f"there is no verb {verb!r}"
        command = found
        group = hasattr(command, "get_command")
        context = command.make_context(verb, list(words), parent=context, resilient_parsing=group)


def table(page: Path, header: str) -> list[list[str]]:
    """The cells of the rows below a table's header."""
    rows = page.read_text().partition(f"\n| {header} |")[2].splitlines()[2:]
    end = next(number for number, row in enumerate(rows) if not row.startswith("|"))
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[:end]]


def named(cell: str) -> str:
    """`skip` of a cell that holds it in backticks."""
    (name,) = CODE.findall(cell)
    return str(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{target}: no such file"
        if heading:
            titles = re.findall(r"^#+ (.+)$", prose(file), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in slugs, f"{target}: no such heading"


@pytest.mark.parametrize("block", blocks("console", "sh"))
def test_commands_are_what_the_command_line_takes(block: str) -> None:
    for words in commands(block):
        parse(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_named_in_a_text_have_verbs_and_options_that_exist(page: Path) -> None:
    for text in CODE.findall(prose(page)):
        words = text.partition(" -- ")[0].split()
        if words[:1] != ["phalanx"]:
            continue
        command: Any = _make_app()
        context = command.make_context("phalanx", [], resilient_parsing=True)
        words = words[1:]
        while words and hasattr(command, "get_command") and not words[0].startswith("-"):
            command = command.get_command(context, words.pop(0))
            assert command is not None, f"`{text}`: no such verb"
        known = {option for parameter in command.get_params(context) for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, f"`{text}`: no such option"


@pytest.mark.parametrize("block", blocks("yaml"))
def test_recipes_and_parts_of_recipes_are_valid(block: str, tmp_path: Path) -> None:
    """Every key has a default, so a part of a recipe is a recipe, too."""
    path = tmp_path / "recipe.yaml"
    path.write_text(block)
    load_recipe(path)


@pytest.mark.parametrize("block", blocks("python"))
def test_python_compiles_and_names_what_phalanx_has(block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("phalanx"):
            module = importlib.import_module(str(node.module))
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_of_the_repository_that_a_page_names_exist(page: Path) -> None:
    if "notes" not in page.parts:  # diaries name what was there then
        named_paths = re.findall(r"`((?:src/phalanx|benchmarks|tests|examples|tools)/[\w./-]+)`", page.read_text())
        assert [path for path in named_paths if not (ROOT / path).exists()] == []


def test_what_the_architecture_page_says_where_to_find_is_there() -> None:
    rows = table(ARCHITECTURE, "what | file | name")
    assert rows
    for _, file, name in rows:
        defined = rf"^ *(class|def) {named(name).split('.')[-1]}\b"
        assert re.search(defined, (ROOT / named(file)).read_text(), re.MULTILINE), name


def test_every_action_of_the_guard_has_its_row() -> None:
    rows = [named(row[0]) for row in table(FAULT_TOLERANCE, "action | when | what follows")]
    assert sorted(rows) == sorted(get_args(NonfiniteAction))


def test_every_exit_code_has_its_row() -> None:
    rows = [int(row[0]) for row in table(EXIT_CODES, "code | meaning | what to do")]
    assert rows == [int(code) for code in ExitCode]


def test_every_cause_of_a_failure_has_its_row() -> None:
    rows = [named(row[0]) for row in table(FAULT_TOLERANCE, "cause | what happened")]
    assert sorted(rows) == sorted(get_args(FailureCause))


def test_the_first_screen_of_the_readme_fits_in_40_lines() -> None:
    screen = (ROOT / "README.md").read_text().partition("\n## ")[0]
    assert screen.count("\n") <= 40


def test_every_page_of_the_site_stands_in_the_index_for_language_models() -> None:
    listed = set(re.findall(r"\]\(([^)#]+\.md)\)", (ROOT / "docs" / "llms.txt").read_text()))
    folders = ("tutorials", "how-to", "reference", "explanation")
    pages = [page for page in ROOT.glob("docs/**/*.md") if page.parent.name in folders]
    assert listed >= {str(page.relative_to(ROOT / "docs")) for page in pages}
