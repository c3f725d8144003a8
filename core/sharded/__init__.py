"""CO2 with its outer state shared out over workers, or on the host."""
