"""The part of a train script around its loop: workers, model and method, checkpoints and the end.

`Run` is what the loop calls. `open_run` makes it, for a fixed set of workers, a layout or elastic workers.
"""
