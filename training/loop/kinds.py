"""The kinds of a run: with a fixed set of workers, under a layout, and with elastic workers."""

from training.elastic import Elastic
from training.loop.run import Run
from training.recipe import Recipe


def open_run(recipe: Recipe) -> Run:
    """Returns the run of the recipe's kind, before its workers meet."""
    if recipe.layout:
        from training.loop.layout_run import LayoutRun  # imported here, because torch's pipelines take a second

        return LayoutRun(recipe)
    return Elastic(recipe) if recipe.elastic else Run(recipe)
