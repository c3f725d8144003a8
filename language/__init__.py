"""Language modelling: GPT-2, a TransNormer-style linear-attention model and RoBERTa, trained with `core`."""

from importlib.util import find_spec

if missing := [name for name in ("tokenizers", "transformers") if find_spec(name) is None]:
    raise SystemExit(f"error: {' and '.join(missing)} not installed, which language needs: pip install -e .[language]")
