from bench.chaos.campaign import main
from training.script import launch

launch(main)
