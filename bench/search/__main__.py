from bench.search.command import main
from training.script import launch

launch(main)
