from bench.simulator.predict import main
from training.recipe import launch

launch(main)
