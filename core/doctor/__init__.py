"""Measures a user's own nodes, and says which settings CO2 would take on them: `torchrun ... -m core.doctor`."""
