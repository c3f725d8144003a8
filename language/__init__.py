"""Language modeling: GPT-2, a TransNormer-style linear-attention model and RoBERTa, trained with `core`."""

from training import require

require("language", "tokenizers", "transformers")
