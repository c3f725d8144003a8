"""Documents of unlike lengths: laws of lengths, whole documents dealt over a round, and rows that hold several."""
