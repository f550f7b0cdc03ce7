"""Models are followed without sympy, which takes half a second to import, and come out as they do with it."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from phalanx.compat import without_symbols
from phalanx.models import moe, transformer
from phalanx.planner.trace import build_on_meta, language_modeling_forward, profile_model

SIZES = {"layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}

def dense():
    return profile_model(build_on_meta(lambda: transformer(100, 16, **SIZES, ffn_hidden_size=64)),
    language_modeling_forward(100, 16), 16)

def experts():
    model = build_on_meta(lambda: moe(100, 16, **SIZES, expert_hidden_size=64, num_experts=4, top_k=2))
    return profile_model(model, language_modeling_forward(100, 16), 16)

without = dense()
print("imported:", sorted({"sympy", "torch.fx.experimental.symbolic_shapes"} & sys.modules.keys()))
without_at_first = experts()
with without_symbols():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv, guard_or_false, sym_eq
    symbol = ShapeEnv().create_unbacked_symint()
    print("a symbol:", guard_or_false(symbol == 3), guard_or_false(3 == 3), sym_eq((1, 2), [1, 2]), sym_eq((1,), (2,)))
import torch
print("the real one stays:", torch.fx.experimental.symbolic_shapes.ShapeEnv is ShapeEnv)
print("the same with it:", (dense(), experts()) == (without, without_at_first))
"""


@pytest.fixture(scope="module")
def told() -> list[str]:
    """What a process that has imported nothing yet tells."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_sympy_is_not_imported(told: list[str]) -> None:
    assert told[0] == "imported: []"


def test_symbols_are_still_understood(told: list[str]) -> None:
    assert told[1:3] == ["a symbol: False True True False", "the real one stays: True"]


def test_profiles_are_those_that_sympy_would_give(told: list[str]) -> None:
    assert told[3] == "the same with it: True"
