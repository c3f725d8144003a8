"""The harness that the train scripts share: recipes, the run around a loop, optimisers, samples, ZeRO, checkpoints."""
