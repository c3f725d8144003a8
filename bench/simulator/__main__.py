from bench.simulator.predict import main
from training.script import launch

launch(main)
