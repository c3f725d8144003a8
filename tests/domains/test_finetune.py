"""Fine-tuning's parts: model folders, what of them is tuned, prompts, and how answers are compared."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import training.prepared  # noqa: F401, transformers imports torchvision when it is installed

# isort: split
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertLMHeadModel, RobertaConfig, RobertaForMaskedLM, RobertaModel

from core.errors import UserError
from language import pretrained
from language.data import IGNORE
from language.finetune_recipes import RECIPES, FinetuneRecipe, LoraConfig
from language.model import blocks_of
from language.prompts import Prompt, PromptTask, answer_scores, answers_of, collate, encode, read_lines
from tests.tiny_models import CONFIGS, POSITIONS, make_model, make_prompts, tiny_tokenizer
from training.weights.evaluate import Evaluation
from training.weights.read import load_weights

KINDS = sorted(CONFIGS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: make_model(folder / kind, kind) for kind in KINDS}


def recipe_of(model: Path | None, **changes) -> FinetuneRecipe:
    return replace(RECIPES["prompts_adamw"], model=model, device="cpu", **changes)


# -- prompts ------------------------------------------------------------------------------------------------------


def write(folder: Path, *lines: object) -> Path:
    file = folder / "train.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def test_a_prompt_and_its_answers_are_cut_where_they_part_and_the_answers_alone_are_targets(tmp_path: Path):
    tokenizer = tiny_tokenizer()
    file = write(
        tmp_path,
        {"prompt": "a film. It was", "answer": " great"},
        "",
        {"prompt": "cold ", "answer": "terrible"},
        '{"prompt": "two\u2028lines", "answer": " great"}',
    )
    lines = read_lines(file)
    assert [line.where for line in lines] == [f"{file} line {n}" for n in (1, 3, 4)] and "\u2028" in lines[2].prompt
    answers = [" great", " terrible"]
    (prompt,) = encode(lines[:1], answers, tokenizer, 40)
    assert tokenizer.decode(prompt.start) == "a film. It was" and prompt.right == 0
    assert [tokenizer.decode(ids) for ids in prompt.ends] == answers and [len(ids) for ids in prompt.ends] == [1, 1]
    (joined,) = encode(lines[1:2], ["great", "terrible"], tokenizer, 40)
    assert tokenizer.decode(joined.start) == "cold", "the blank has become the answer's"
    assert [tokenizer.decode(ids) for ids in joined.ends] == answers
    prompt = Prompt([5, 6, 7], [[8], [9, 10]], right=1)
    inputs, targets = collate([prompt.sample(), prompt.sample(0)])
    assert inputs.tolist() == [[5, 6, 7, 9], [5, 6, 7, 0]]
    assert targets.tolist() == [[IGNORE, IGNORE, 9, 10], [IGNORE, IGNORE, 8, IGNORE]]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_score_in_a_batch_as_each_by_itself(models: dict[str, Path], kind: str):
    model = pretrained.open_model(recipe_of(models[kind]))
    prompts = [Prompt([5, 6, 7, 9], [[8], [9, 10, 30]], 1), Prompt([11], [[12], [9, 10, 30]], 0)]
    found = torch.stack(list(answer_scores(model, prompts, 4, torch.device("cpu"))))
    for prompt, scores in zip(prompts, found, strict=True):
        for end, (nats, tokens) in zip(prompt.ends, scores.tolist(), strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt.start + end])).logits[0].double().log_softmax(-1)
            expected = sum(float(logits[len(prompt.start) + i - 1, id]) for i, id in enumerate(end))
            assert tokens == len(end) and nats == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a", "answer": '], "line 1 is no JSON"),
        ([{"prompt": "a", "answer": " b"}, {"prompt": "a"}], 'line 2 has no text as its "answer": add it'),
        (["[1]"], 'line 1 has no text as its "prompt"'),
        (["", " "], "holds no prompt"),
        ([{"prompt": "a", "answer": f" {i}"} for i in range(101)], "has 101 answers: a classification has 2 to 100"),
        ([{"prompt": "a", "answer": " b"}, {"prompt": "film " * 60, "answer": "c"}], "line 2 has .* tokens .* reads"),
        ([{"prompt": "w", "answer": "as"}, {"prompt": "It", "answer": " was"}], "no token is the prompt's"),
    ],
)
def test_a_damaged_prompt_file_is_refused(tmp_path: Path, lines: list[object], message: str):
    file = write(tmp_path, *lines)
    with pytest.raises(UserError, match=message):
        found = read_lines(file)
        encode(found, answers_of(found, (), file), tiny_tokenizer(), POSITIONS)


def test_an_answer_that_the_training_file_does_not_have_is_refused(tmp_path: Path):
    make_prompts(tmp_path)
    with open(tmp_path / "val.jsonl", "a") as file:
        file.write('{"prompt": "a film. It was", "answer": " dull"}\n')
    with pytest.raises(UserError, match="val.jsonl line 21 has the answer ' dull', which is none of ' great', ' terr"):
        PromptTask.open(recipe_of(None), tmp_path, tiny_tokenizer(), POSITIONS)
    given = recipe_of(None, answers=(" great", " terrible", " dull"))
    assert len(PromptTask.open(given, tmp_path, tiny_tokenizer(), POSITIONS).val[-1].ends) == 3


def test_an_evaluation_reads_as_many_samples_at_once_as_a_micro_batch(tmp_path: Path, monkeypatch):
    recipe, read = recipe_of(None, batch_size=32, accumulate=4), []

    def scores(model: object, prompts: list[Prompt], batch_size: int, device: object) -> list[torch.Tensor]:
        read.append(batch_size)
        return [torch.ones(2, 2)] * len(prompts)

    monkeypatch.setattr("language.prompts.answer_scores", scores)
    task = PromptTask.open(recipe, make_prompts(tmp_path), tiny_tokenizer(), POSITIONS)
    run = Evaluation(recipe, torch.device("cpu"))
    run.rank, run.world_size, run.data_workers = 1, 2, 2
    task.evaluate(run, torch.nn.Identity(), at_end=True)  # pyright: ignore[reportArgumentType]
    assert read == [32 // 2 // 4]


def test_workers_share_each_batch_out(tmp_path: Path):
    task = PromptTask.open(recipe_of(None), make_prompts(tmp_path), tiny_tokenizer(), POSITIONS)
    whole, *parts = (
        [[row[row != 0].tolist() for row in inputs] for inputs, _ in task.batches(recipe_of(None), rank, workers, 2, 5)]
        for rank, workers in ((0, 1), (0, 2), (1, 2))
    )
    assert len(whole) == 3 and [len(batch) for batch in whole] == [16] * 3
    assert whole == [a + b for a, b in zip(*parts, strict=True)]


# -- model folders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_opened_and_written_as_it_was(models: dict[str, Path], kind: str, tmp_path: Path):
    model = pretrained.open_model(recipe_of(models[kind]))
    tokenizer = pretrained.open_tokenizer(models[kind], model)
    assert not model.config.use_cache, "training needs no cache"
    assert not model.training and pretrained.positions(model, None) == POSITIONS and len(blocks_of(model)) == 2
    for _ in range(2):  # the second time in place of the first
        pretrained.write_model(model, tokenizer, tmp_path / "out")
    first, again = (load_file(folder / "model.safetensors") for folder in (models[kind], tmp_path / "out"))
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    for name in ("config.json", "generation_config.json"):
        before, after = (json.loads((folder / name).read_text()) for folder in (models[kind], tmp_path / "out"))
        assert before["use_cache"] is after["use_cache"] is True and after["eos_token_id"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert pretrained.open_tokenizer(tmp_path / "out", model)(["a film"]).input_ids == tokenizer(["a film"]).input_ids


def damaged(of: Path, folder: Path, name: str, change: Callable[[Path], object]) -> Path:
    shutil.copytree(of, folder / "model")
    change(folder / "model" / name)
    return folder / "model"


def set_key(key: str, value: object) -> Callable[[Path], object]:
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))


def move_token(file: Path) -> None:
    """Gives a token an id behind a gap."""
    content = json.loads(file.read_text())
    content["model"]["vocab"]["!"] = 500
    file.write_text(json.dumps(content))


def add_tensors(*names: str) -> Callable[[Path], None]:
    return lambda file: save_file(load_file(file) | {name: torch.ones(3) for name in names}, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", Path.unlink, "config.json is missing"),
        ("config.json", set_key("model_type", "vit"), "no causal language model of model_type 'vit'"),
        ("config.json", set_key("n_layer", 3), "12 tensors are missing, such as transformer.h.2.attn"),
        ("model.safetensors", add_tensors("lora.weight"), "1 tensors have no place .*, such as lora.weight:"),
        ("config.json", set_key("n_embd", 16), "tensors have another shape than config.json says"),
        ("config.json", set_key("n_head", 3), "cannot be opened"),
        ("model.safetensors", Path.unlink, "has no .*safetensors: convert"),
        ("model.safetensors", lambda file: file.write_bytes(file.read_bytes()[:-1000]), "opened .SafetensorErr"),
        ("model.safetensors", lambda file: file.write_bytes(b""), "opened .SafetensorErr"),
        ("tokenizer.json", Path.unlink, "has no tokenizer: add its files"),
        ("tokenizer.json", lambda file: file.write_text("{}"), "cannot be opened"),
        ("tokenizer.json", move_token, "its tokenizer has 501 tokens, its model 448: they are not one pair"),
    ],
)
def test_a_damaged_folder_is_refused(models: dict[str, Path], tmp_path: Path, name: str, change, message: str):
    folder = damaged(models["gpt2"], tmp_path, name, change)
    with pytest.raises(UserError, match=message):
        pretrained.open_tokenizer(folder, pretrained.open_model(recipe_of(folder)))


def test_buffers_that_older_versions_wrote_are_no_weights(models: dict[str, Path], tmp_path: Path):
    """GPT-2's own files have causal masks; a tied output layer may lie in a file beside what it is tied to."""
    kept = (
        "transformer.h.0.attn.bias",
        "transformer.h.1.attn.masked_bias",
        "h.0.attn.bias",
        "model.rotary_emb.inv_freq",
    )
    folder = damaged(models["gpt2"], tmp_path, "model.safetensors", add_tensors(*kept))
    tensors = load_file(folder / "model.safetensors")
    tied = tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()}
    save_file(tied, folder / "model.safetensors", {"format": "pt"})
    pretrained.open_model(recipe_of(folder))


def test_no_folder_an_encoder_and_a_tokenizer_of_another_model_are_refused(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
):
    with pytest.raises(UserError, match="add --model FOLDER"):
        pretrained.open_model(recipe_of(None))
    with pytest.raises(UserError, match="opt-125m/config.json is missing: .* none is fetched"):
        pretrained.open_model(recipe_of(Path("facebook/opt-125m")))
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=310)
    BertLMHeadModel(BertConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="sees later tokens"):
        pretrained.open_model(recipe_of(tmp_path))
    model = pretrained.open_model(recipe_of(models["gpt2"]))
    model.resize_token_embeddings(200)
    with pytest.raises(UserError, match="they are not one pair"):
        pretrained.open_tokenizer(models["gpt2"], model)
    model.resize_token_embeddings(330)
    model.config.eos_token_id = 7
    pretrained.open_tokenizer(models["gpt2"], model)
    assert "ends a text" not in capsys.readouterr().err, "the generation's own end is the tokenizer's"
    model.generation_config.eos_token_id = None
    pretrained.open_tokenizer(models["gpt2"], model)
    assert "its tokenizer ends a text with token 0, its model with [7]: make sure" in capsys.readouterr().err
    model.resize_token_embeddings(1000)
    with pytest.raises(UserError, match="token 0, its model with .7., and they have .* tokens: they are not one pair"):
        pretrained.open_tokenizer(models["gpt2"], model)
    with pytest.raises(UserError, match="context=64: the model has 48 positions"):
        pretrained.positions(model, 64)


def test_lora_puts_equal_adapters_in_and_writes_them_alone(models: dict[str, Path], tmp_path: Path):
    pytest.importorskip("peft", reason="peft is not installed")
    of_seed = lambda seed: pretrained.open_model(recipe_of(models["opt"], lora=LoraConfig(4), seed=seed))  # noqa: E731
    first, again, other = map(of_seed, (0, 0, 1))
    tuned = [(name, p) for name, p in first.named_parameters() if p.requires_grad]
    assert tuned and all("lora_" in name for name, _ in tuned)
    assert all(torch.equal(p, dict(again.named_parameters())[name]) for name, p in tuned)
    assert not all(torch.equal(p, dict(other.named_parameters())[name]) for name, p in tuned)
    pretrained.write_model(first, tiny_tokenizer(), tmp_path / "out")
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    with pytest.raises(UserError, match="lora.targets=nothing"):
        pretrained.open_model(recipe_of(models["opt"], lora=LoraConfig(4, targets=("nothing",))))


def test_a_folder_whose_tokens_have_other_ids_is_refused(models: dict[str, Path], tmp_path: Path):
    model = pretrained.open_model(recipe_of(models["gpt2"]))
    tokenizer = pretrained.open_tokenizer(models["gpt2"], model)
    ids = tokenizer.get_vocab()
    model.names = sorted(ids, key=ids.__getitem__)
    load_weights(model, models["gpt2"])
    model.names[7], model.names[8] = model.names[8], model.names[7]
    with pytest.raises(UserError, match="was trained with other data, output 7 is "):
        load_weights(model, models["gpt2"])
    folder = damaged(models["gpt2"], tmp_path, "tokenizer.json", Path.unlink)
    load_weights(model, folder)  # nothing says what its tokens are
    (folder / "vocab.json").write_text(json.dumps(ids))
    with pytest.raises(UserError, match="was trained with other data, output 7 is "):
        load_weights(model, folder)
    (folder / "vocab.json").write_text(json.dumps({"a": 10**12}))
    with pytest.raises(UserError, match="vocab.json cannot be read .ValueError: a token has the id 1000000000000"):
        load_weights(model, folder)


def test_a_folder_that_lacks_tensors_of_the_model_is_refused(tmp_path: Path):
    sizes = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config = RobertaConfig(**sizes)  # type: ignore[arg-type]
    RobertaModel(config).save_pretrained(tmp_path / "base")
    RobertaForMaskedLM(config).save_pretrained(tmp_path / "whole")
    load_weights(model := RobertaForMaskedLM(config), tmp_path / "whole")
    with pytest.raises(UserError, match="lm_head.* give a folder of a RobertaForMaskedLM"):
        load_weights(model, tmp_path / "base")
