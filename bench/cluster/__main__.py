from bench.cluster.launch import main
from training.recipe import launch

launch(main)
