"""CO2 inside other training frameworks. Each module imports its framework only when you import the module."""
