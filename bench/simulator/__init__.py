"""A model of training rounds on clusters nobody has; its command line is python -m bench.simulator."""
