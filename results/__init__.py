"""What the paper reports, as data (paper.py), and what was measured here (RESULTS.md and the files that it names)."""
