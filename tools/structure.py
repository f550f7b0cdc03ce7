"""Print the figures of the code's structure next to their goals: `python tools/structure.py` (`make structure`).

`--budgets` only compares the lines of each package with its budget (`make lint`).
"""

import ast
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from words import ROOT, all_words

SRC = ROOT / "src" / "phalanx"
BUDGETS = {
    "src/phalanx/app": 4_960,
    "src/phalanx/autoconfig": 2_880,
    "src/phalanx/cli": 3_010,
    "src/phalanx/cluster": 4_890,
    "src/phalanx/data": 6_440,
    "src/phalanx/jobs": 10_470,
    "src/phalanx/models": 1_220,
    "src/phalanx/observe": 4_090,
    "src/phalanx/planner": 4_780,
    "src/phalanx/recipe": 3_190,
    "src/phalanx/run": 3_200,
    "src/phalanx/serve": 2_050,
    "src/phalanx/storage": 2_020,
    "src/phalanx/telemetry": 1_340,
    "src/phalanx/train": 24_150,
    "fleet/src": 15_170,
}
"""Lines of each package. Raising one is a commit of its own that says what users get for it."""
GOALS = {"src/phalanx": 80_000, "fleet/src": 17_400, "tests": 74_000}
MOST_PARAMETERS = 7
REASON = re.compile(r"\bThe (many )?(parameters|arguments)\s+(are|replace)\b")
"""How the sentence of a docstring begins that says why a function takes more."""


@dataclass(frozen=True)
class Figure:
    """A measured figure, its goal, and examples of what misses it."""

    what: str
    value: float
    goal: float
    examples: tuple[str, ...] = ()

    @property
    def reached(self) -> bool:
        """Whether it is no larger than its goal."""
        return self.value <= self.goal


def modules() -> dict[str, tuple[Path, ast.Module]]:
    """Every module of the package: its dotted name, file and syntax tree."""
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = (path, ast.parse(path.read_text()))
    return found


def _where(path: Path, node: ast.stmt | ast.expr, name: str) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}: {name}"


def class_names(trees: dict[str, tuple[Path, ast.Module]]) -> Figure:
    """Public class names that are defined more than once."""
    places: dict[str, list[str]] = {}
    for path, tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(_where(path, node, node.name))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    return Figure(
        "public class names defined twice", len(twice), 0, tuple(p for found in twice.values() for p in found)
    )


def constants(trees: dict[str, tuple[Path, ast.Module]]) -> Figure:
    """Module constants whose name is one word."""
    found = []
    for path, tree in trees.values():
        for node in tree.body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            names = [each for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
            found += [_where(path, node, each.id) for each in names if re.fullmatch(r"_?[A-Z][A-Z0-9]*", each.id)]
    return Figure("one-word module constants", len(found), 0, tuple(found))


def parameters(trees: dict[str, tuple[Path, ast.Module]]) -> Figure:
    """Public functions and constructors with more than MOST_PARAMETERS parameters and no reason in their docstring."""
    found = []
    for path, tree in trees.values():
        for owner, node in _functions(tree):
            count = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) - (owner is not None)
            private = node.name.startswith("_") and node.name != "__init__"
            doc = ast.get_docstring(node) or (ast.get_docstring(owner) if owner is not None else "") or ""
            if count > MOST_PARAMETERS and not private and not REASON.search(doc) and not _is_command(node):
                name = node.name if owner is None else f"{owner.name}.{node.name}"
                found.append(_where(path, node, f"{name} ({count})"))
    return Figure(f"public functions with over {MOST_PARAMETERS} parameters", len(found), 0, tuple(found))


def _functions(tree: ast.Module) -> Iterator[tuple[ast.ClassDef | None, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield None, node
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield node, each


def _is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether its parameters are the options of a command line: `Annotated[..., typer.Option(...)]`."""
    annotations = [ast.unparse(each.annotation) for each in node.args.args if each.annotation is not None]
    return any(each.startswith("Annotated[") and "typer." in each for each in annotations)


def imports(trees: dict[str, tuple[Path, ast.Module]]) -> dict[str, set[str]]:
    """The modules that each module imports when it is imported itself: not within functions, nor for types only."""
    graph: dict[str, set[str]] = {name: set() for name in trees}
    for name, (path, tree) in trees.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in _at_import(tree):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names if alias.name in trees}
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    base = ".".join(
                        [*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])]
                    )
                below = {f"{base}.{alias.name}" for alias in node.names} & trees.keys()
                graph[name] |= below or ({base} & trees.keys())
        graph[name].discard(name)
    return graph


def _at_import(tree: ast.Module) -> Iterator[ast.stmt]:
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        yield node
        for field in ("body", "orelse", "finalbody", "handlers"):
            pending += getattr(node, field, [])


def cycles(graph: dict[str, set[str]]) -> Figure:
    """Groups of files that import each other (strongly connected components, by Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(group)

    sys.setrecursionlimit(10_000)
    for name in sorted(graph):
        if name not in index:
            visit(name)
    return Figure("file cycles", len(found), 0, tuple(" <-> ".join(group) for group in found))


def arrows_up() -> Figure:
    """Imports against the layers, as import-linter counts them."""
    done = subprocess.run([Path(sys.executable).with_name("lint-imports")], capture_output=True, text=True, cwd=ROOT)
    broken = [line for line in done.stdout.splitlines() if line.endswith("BROKEN")]
    return Figure("layer contracts broken", len(broken), 0, tuple(broken))


def sizes() -> Iterator[Figure]:
    """Files at the top level of train, and lines of the package."""
    top = sorted(path.name for path in (SRC / "train").glob("*.py"))
    yield Figure("files at one level of train/", len(top), 26, tuple(top))
    for directory in ("src/phalanx", "fleet/src"):
        yield Figure(f"lines of {directory}", count_lines(directory), GOALS[directory])
    yield Figure("lines of the tests of both", count_lines("tests") + count_lines("fleet/tests"), GOALS["tests"])


def count_lines(directory: str) -> int:
    """Lines of the Python files below a directory."""
    return sum(len(path.read_bytes().splitlines()) for path in (ROOT / directory).rglob("*.py"))


def find_exceeded_budgets() -> list[str]:
    """Packages that are larger than their budget, with both numbers."""
    sizes = {directory: count_lines(directory) for directory in BUDGETS}
    return [f"{name}: {size} lines, budget {BUDGETS[name]}" for name, size in sizes.items() if size > BUDGETS[name]]


def start_times(repeats: int = 5) -> Iterator[Figure]:
    """Seconds that an import and `--help` take, the median of some runs."""
    python = sys.executable
    for what, command in {
        "seconds of `import phalanx`": [python, "-c", "import phalanx"],
        "seconds of `phalanx --help`": [str(Path(python).with_name("phalanx")), "--help"],
    }.items():
        seconds = []
        for _ in range(repeats):
            begun = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            seconds.append(time.perf_counter() - begun)
        yield Figure(what, round(statistics.median(seconds), 3), 0.15)


STEP_PROGRAM = """
import os, sys, traceback
from torch.optim.optimizer import register_optimizer_step_pre_hook

def report(*_):
    names = [frame.name for frame in traceback.extract_stack()]
    entry = names.index("run_worker")
    end = names.index("wrapper", entry)  # torch's, around Optimizer.step
    print(*names[entry:end], "Optimizer.step", file=sys.__stdout__, flush=True)
    os._exit(0)

register_optimizer_step_pre_hook(report)
from phalanx.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""Trains one step in this process, as under torchrun, and prints the functions on the stack of `optimizer.step()`."""


def step_frames() -> Figure:
    """Frames from the entry of a worker to `optimizer.step()`."""
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    torchrun |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "GLOO_SOCKET_IFNAME": "lo"}
    sizes = ["steps=1", "batch.global_size=1", "batch.micro_size=1", "precision=fp32", "memory.chunked_loss=false"]
    sizes += ["model.args.layers=1", "model.args.hidden_size=32", "model.args.num_heads=2"]
    sizes += ["memory.activation_checkpointing=none", "data.source.text=README.md", "data.seq_len=16"]
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "recipe.yaml")
        recipe.write_bytes((ROOT / "examples" / "gpt-python.yaml").read_bytes())
        shutil.copy(ROOT / "README.md", folder)
        command = [sys.executable, "-c", STEP_PROGRAM, "train", str(recipe), *sizes, "--run", f"{folder}/run"]
        done = subprocess.run(command, env={**os.environ, **torchrun}, capture_output=True, text=True)
    names = tuple(done.stdout.split())
    if not names or names[-1] != "Optimizer.step":
        raise RuntimeError(f"no step was done:\n{done.stderr}")
    return Figure("frames from a worker's entry to optimizer.step()", len(names), 5, names)


def figures() -> Iterator[Figure]:
    """All of them."""
    words = all_words()
    top = Counter(each.word for each in words).most_common(8)
    yield Figure("banned words", len(words), 0, tuple(f"{word}: {count}" for word, count in top))
    trees = modules()
    yield class_names(trees)
    yield constants(trees)
    yield from sizes()
    yield parameters(trees)
    yield cycles(imports(trees))
    yield arrows_up()
    yield step_frames()
    yield from start_times()


def main() -> int:
    if "--budgets" in sys.argv[1:]:
        exceeded = find_exceeded_budgets()
        print("\n".join(exceeded), end="\n" if exceeded else "")
        return 1 if exceeded else 0
    shown = "--list" in sys.argv[1:]
    missed = 0
    for figure in figures():
        missed += not figure.reached
        mark = "  " if figure.reached else "x "
        print(f"{mark}{figure.what:48} {figure.value:>10,}   goal {figure.goal:,}", flush=True)
        for example in figure.examples if shown and not figure.reached else ():
            print(f"      {example}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
