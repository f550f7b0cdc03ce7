"""benchmarks/gpu_session.py without a GPU: what it gives to `phalanx train`."""

import gpu_session
from phalanx.models import transformer
from phalanx.recipe.imports import fill_arguments
from phalanx.recipe.load import load_recipe


def test_every_run_whose_bits_are_compared_is_a_recipe_that_phalanx_takes() -> None:
    for case in gpu_session.BITS:
        recipe = load_recipe(None, [*gpu_session.TINY, *case.overrides]).recipe
        fill_arguments(transformer, recipe.model.args, {"vocab_size": 256, "seq_len": 256})
