from bench.cluster.launch import main
from training.script import launch

launch(main)
