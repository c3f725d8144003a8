"""CO2 inside other training frameworks; each module imports its framework when it is imported itself."""
