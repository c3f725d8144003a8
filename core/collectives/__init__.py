"""Collectives beside the paper's one, which is the all-reduce of core/groups.py, as stages of a reduction."""
