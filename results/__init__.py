"""What the paper reports, as data (paper.py), and what was measured here (index.md and the pages that it names)."""
