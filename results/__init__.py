"""The numbers that the paper reports (paper.py), and our measurements (index.md and the pages that it names)."""
