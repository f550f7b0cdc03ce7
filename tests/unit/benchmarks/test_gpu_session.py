"""benchmarks/gpu_session.py without a GPU: what it gives to `phalanx train`."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from phalanx.models import transformer
from phalanx.recipe.imports import fill_arguments
from phalanx.recipe.load import load_recipe

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def gpu_session() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        import gpu_session

        yield gpu_session


def test_every_run_whose_bits_are_compared_is_a_recipe_that_phalanx_takes(gpu_session: ModuleType) -> None:
    for case in gpu_session.BITS:
        recipe = load_recipe(None, [*gpu_session.TINY, *case.overrides]).recipe
        fill_arguments(transformer, recipe.model.args, {"vocab_size": 256, "seq_len": 256})
