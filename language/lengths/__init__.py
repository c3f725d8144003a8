"""Documents of different lengths: whole documents assigned over a round, and rows that hold several documents."""
