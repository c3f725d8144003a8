"""What the train scripts share: recipes, the run and its folder, optimisers, samples, ZeRO, checkpoints."""
