"""What a run settles about its exchange only when it is under way, for whoever starts it again: in resolved.yaml."""

from phalanx.recipe import Recipe, dump_recipe, load_recipe
from phalanx.recipe.schema import Exchange
from phalanx.run import Run
from phalanx.run.directory import write_whole
from phalanx.train.place import Place


def with_exchange(run: Run, recipe: Recipe, place: Place, exchange: Exchange) -> Recipe:
    """The recipe with this exchange, which the run's resolved recipe says from now on. All workers call it."""
    if place.leads:
        resolved = load_recipe(run.resolved).recipe
        write_whole(run.resolved, dump_recipe(resolved.model_copy(update={"exchange": exchange})))
    return recipe.model_copy(update={"exchange": exchange})
