from bench.peers.compare import main
from training.recipe import launch

launch(main)
