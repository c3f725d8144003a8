"""The part of a train script around its loop: workers, model and method, checkpoints and the end.

`Run` is what the loop calls. A part of it differs between a fixed set of workers, a layout and elastic workers.
"""
