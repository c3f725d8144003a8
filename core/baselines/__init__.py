"""The methods that CO2 is compared with, and the table of all methods."""
