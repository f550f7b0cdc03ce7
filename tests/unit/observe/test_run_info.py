"""What a report says of a run's recipe."""

from phalanx.observe.run_info import _describe_data
from phalanx.recipe import Recipe


def test_data_are_described_by_the_keys_of_the_recipe() -> None:
    recipe = Recipe.model_validate({"data": {"source": {"text": "a.txt"}, "seq_len": 128}})
    assert _describe_data(recipe.model_dump(mode="json")["data"], "x") == "a.txt; tokenizer bytes, sequence 128"
