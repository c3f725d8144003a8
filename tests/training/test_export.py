"""Exports on a full disk: one line, and no file under its final name."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.damages import room
from tests.scripts import refused
from training.recipe import Recipe
from training.weights.export import Exporter, write

TASK = Exporter(
    Recipe,
    lambda recipe, weights: nn.Linear(64, 64),
    lambda recipe, model: (model, torch.zeros(2, 64)),
    folder=lambda recipe, model, target: torch.save(model.state_dict(), target / "weights"),
)


@pytest.mark.parametrize("name", ["m.safetensors", "m.pth", "m.pt2", "folder"])
def test_a_full_disk_leaves_no_file(tmp_path: Path, name: str):
    out = tmp_path / "of" / name
    with room(2000), refused(f"{out}: cannot be written ("):
        write(TASK, Recipe(), nn.Linear(64, 64), out)
    assert list(out.parent.iterdir()) == []
    write(TASK, Recipe(), nn.Linear(64, 64), out)
    assert [path.name for path in out.parent.iterdir()] == [name]


@pytest.mark.parametrize("size", [500, 3000])  # for neither the weights, or for the weights alone
def test_a_full_disk_keeps_the_last_tuned_model(tmp_path: Path, size: int):
    import training.prepared  # noqa: F401

    # isort: split
    from tokenizers import Tokenizer, models
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    from language.pretrained import write_model

    words = {f"word{i}": i for i in range(2 if size == 500 else 900)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "word0")))
    model = GPT2LMHeadModel(GPT2Config(vocab_size=2, n_positions=2, n_embd=2, n_layer=0, n_head=1))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()
    with room(size), refused(f"{tmp_path / 'model'}: cannot be written ("):
        write_model(model, tokenizer, tmp_path / "model")
    assert list(tmp_path.rglob("*")) == [tmp_path / "model", tmp_path / "model" / "old"]
