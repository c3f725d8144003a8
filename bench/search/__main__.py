from bench.search.command import main
from training.recipe import launch

launch(main)
