"""How averages cross the network in fewer bytes."""
