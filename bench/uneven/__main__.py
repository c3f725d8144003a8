from bench.uneven.command import main
from training.script import launch

launch(main)
