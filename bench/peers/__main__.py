from bench.peers.compare import main
from training.script import launch

launch(main)
