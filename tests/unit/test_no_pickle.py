"""Nothing that a peer, a file or another process sent is unpickled: no module of Phalanx names what would."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import phalanx

SOURCES = sorted(Path(phalanx.__file__).parent.rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "multiprocessing"}
NAMES = {
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
CALLS = {"torch.load", "np.load", "numpy.load", "torch.hub.load", "pandas.read_pickle", "dist.rpc", "yaml.unsafe_load"}


def unsafe(source: str) -> Iterator[str]:
    """What of this in a module's source would unpickle or run what somebody sent."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").partition(".")[0] in MODULES:
                yield node.module or ""
            yield from (f"{node.module}.{each.name}" for each in node.names if _named(node.module or "", each.name))
        elif isinstance(node, ast.Attribute) and (node.attr in NAMES or ast.unparse(node) in CALLS):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            yield node.func.id


def _named(module: str, name: str) -> bool:
    return name in NAMES or f"{module}.{name}" in CALLS


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(SOURCES[0].parent)))
def test_no_module_unpickles(path: Path) -> None:
    assert list(unsafe(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        *(
            "import pickle",
            "import torch, pickle as p",
            "from pickle import loads",
            "import multiprocessing.connection",
        ),
        *("import torch.distributed as dist\ndist.broadcast_object_list(box, src=0)", "torch.load(path)"),
        *("from torch.distributed import all_gather_object", "from torch import load", "np.load(path)", "eval(text)"),
    ],
)
def test_the_search_finds_what_it_is_for(source: str) -> None:
    assert list(unsafe(source))
