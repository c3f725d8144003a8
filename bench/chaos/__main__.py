from bench.chaos.campaign import main
from training.recipe import launch

launch(main)
