"""Measurements of speed and loss, and the emulated cluster on which they run."""

import os

import training  # noqa: F401, says in one line what is not installed

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # gloo's warnings about host names; torch reads it when imported
