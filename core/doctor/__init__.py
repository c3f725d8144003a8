"""Measures a user's own nodes, and prints the settings that CO2 takes on them: `torchrun ... -m core.doctor`."""
