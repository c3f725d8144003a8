"""Measures your nodes, and prints the settings that CO2 uses on them: `torchrun ... -m core.doctor`."""
