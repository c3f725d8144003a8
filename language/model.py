"""The language models: GPT-2 and RoBERTa from transformers, with random weights, and TransNormer.

All of them map int64 token ids [batch, time] to an object whose `logits` are [batch, time, vocab_size].
"""

from typing import Any

import training.prepared  # noqa: F401, transformers imports torchvision when it is installed

# isort: split
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, RobertaConfig, RobertaForMaskedLM
from transformers.modeling_outputs import MaskedLMOutput
from transformers.pytorch_utils import Conv1D

from language.recipe import ModelName
from language.transnormer import TransNormer, TransNormerConfig
from training import optim
from training.optim import OptimConfig

# Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; tiny is ours.
GPT2_SIZES = {
    "gpt2_tiny": dict(n_layer=4, n_head=4, n_embd=128),
    "gpt2_small": dict(n_layer=12, n_head=12, n_embd=768),
    "gpt2_medium": dict(n_layer=24, n_head=16, n_embd=1024),
    "gpt2_large": dict(n_layer=36, n_head=20, n_embd=1280),
    "gpt2_xl": dict(n_layer=48, n_head=25, n_embd=1600),
}
# Liu et al., arXiv 1907.11692; tiny is ours.
ROBERTA_SIZES = {
    "roberta_tiny": dict(num_hidden_layers=4, num_attention_heads=4, hidden_size=128, intermediate_size=512),
    "roberta_base": dict(num_hidden_layers=12, num_attention_heads=12, hidden_size=768, intermediate_size=3072),
    "roberta_large": dict(num_hidden_layers=24, num_attention_heads=16, hidden_size=1024, intermediate_size=4096),
}
# Both are ours: we do not know TransNormer-LLM 7B's sizes. These give 7 billion parameters.
TRANSNORMER_SIZES = {
    "transnormer_tiny": dict(layers=4, width=128, heads=4, glu_width=256),
    "transnormer_7b": dict(layers=30, width=4096, heads=32, glu_width=10880),
}


class MaskedRoberta(RobertaForMaskedLM):
    """RoBERTa whose head, which is as large as the vocabulary, only computes the positions that are predicted."""

    def forward(self, input_ids: Tensor, positions: Tensor | None = None) -> MaskedLMOutput:
        """Returns logits [batch, time, vocab_size] for int64 [batch, time], or [n, vocab_size] at n positions."""
        hidden = self.roberta(input_ids)[0]
        return MaskedLMOutput(logits=self.lm_head(hidden if positions is None else hidden.flatten(0, 1)[positions]))


def build_model(name: ModelName, *, vocab_size: int, context: int, dropout: float, pad: int | None = None) -> nn.Module:
    """Returns a model with random weights, drawn from torch's default generator.

    Dropout is on embeddings, attention weights and residual branches. TransNormer has none. `pad` is the id of the pad
    token, for RoBERTa only. Its position numbers begin after it.
    """
    common: dict[str, Any] = {"vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": None}
    if name in GPT2_SIZES:
        # The two functions are equal. transformers' "gelu_new" keeps five tensors for it, and torch's kernel keeps one.
        act = "gelu_new" if name == "gpt2_tiny" else "gelu_pytorch_tanh"
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        sizes = GPT2_SIZES[name] | {"n_positions": context, "use_cache": False, "activation_function": act}
        return GPT2LMHeadModel(GPT2Config(**common, **drops, **sizes))
    if name in ROBERTA_SIZES:
        assert pad is not None, "a masked model needs a vocabulary with a pad token"
        drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
        sizes = ROBERTA_SIZES[name] | {"max_position_embeddings": context + pad + 1}  # numbers begin at pad + 1
        other = {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": pad}
        return MaskedRoberta(RobertaConfig(**common, **drops, **sizes, **other))
    return TransNormer(TransNormerConfig(vocab_size=vocab_size, **TRANSNORMER_SIZES[name]))


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Returns the model's largest list of modules, its transformer blocks, or an empty list if there is none."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()), default=nn.ModuleList())


def is_causal(name: ModelName) -> bool:
    """Returns whether the model predicts the next token. Otherwise it is trained on masked tokens."""
    return name not in ROBERTA_SIZES


def decay_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Returns two parameter groups. Weight decay is on matrices that multiply, not on biases, norms and embeddings.

    timm's rule and transformers' Trainer also decay embeddings.
    """
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear | Conv1D)} - embedded
    return optim.decay_groups(model, config, usual=lambda _, p: id(p) in matrices)


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Returns training.optim.make_optimizer's optimizer of `decay_groups`. Muon gets the matrices of the blocks."""
    groups = decay_groups(model, config)
    if config.name == "muon":
        inside = {id(p) for p in blocks_of(model).parameters() if p.ndim == 2}
        groups = [
            group | {"params": [p for p in group["params"] if (id(p) in inside) == muon], "muon": muon}
            for group in groups
            for muon in (True, False)
        ]
    return optim.make_optimizer(model, config, groups)
