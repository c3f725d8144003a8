"""A campaign of kills, outages and damage against small runs: python -m bench.chaos."""
