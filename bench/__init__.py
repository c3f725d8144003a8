"""Speed measurements, and the emulated cluster that they run on."""

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # gloo's warnings about host names; torch reads it when imported
