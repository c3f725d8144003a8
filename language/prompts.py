"""Classification by prompts, as in MeZO (Malladi et al., arXiv 2305.17333): a file has a prompt and its right answer a
line, `{"prompt": "a gorgeous film. It was", "answer": " great"}`; the two are joined as they stand.

The loss is that of the answer's tokens alone. A model's choice is the answer of the largest log-likelihood per token,
as in MeZO's evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from core.errors import UserError
from core.stored import parse_json
from language.data import IGNORE, Batch
from language.finetune_recipes import FinetuneRecipe
from training.data import eval_share, load_batches, train_keys
from training.elastic import repeated

if TYPE_CHECKING:
    from training.run import Run

SAMPLES, SHOWN = 4, 8  # prompts for TensorBoard, and answers of each
MOST_ANSWERS = 100  # of a classification; each is tried on every held-out prompt


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens, `start`, and how each answer goes on from there; `right` is the index of the right one. Where
    a prompt's last token joins an answer's first one, `start` ends before it."""

    start: list[int]
    ends: list[list[int]]
    right: int

    def sample(self, answer: int | None = None) -> tuple[list[int], int]:
        """The tokens of the prompt with an answer, the right one by default, and how many of them are the prompt's."""
        return self.start + self.ends[self.right if answer is None else answer], len(self.start)


class Line(NamedTuple):
    """A line of a prompt file, and its place."""

    where: str
    prompt: str
    answer: str


def read_lines(file: Path) -> list[Line]:
    """The lines of a prompt file, empty ones left out; UserError names the line that is damaged."""
    if not file.is_file():
        raise UserError(f'{file} is missing: it should have {{"prompt": ..., "answer": ...}} a line')
    try:
        texts = file.read_text(encoding="utf-8-sig").split("\n")  # JSON may hold what else splitlines() parts lines at
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text ({error.reason}): convert it") from None
    lines = []
    for where, text in ((f"{file} line {n}", text) for n, text in enumerate(texts, 1) if text.strip()):
        try:
            found = parse_json(text)
        except ValueError as error:
            raise UserError(f"{where} is no JSON ({error}): correct it") from None
        for key in ("prompt", "answer"):
            value = found.get(key) if isinstance(found, dict) else None
            if not isinstance(value, str) or not value.strip():
                raise UserError(f'{where} has no text as its "{key}": add it')
        lines.append(Line(where, found["prompt"], found["answer"]))
    if not lines:
        raise UserError(f"{file} holds no prompt: give one or more")
    return lines


def answers_of(lines: list[Line], given: tuple[str, ...], file: Path) -> list[str]:
    """The answers to choose from: those that are given, or all of the training file, sorted."""
    answers = list(given) or sorted({line.answer for line in lines})
    if not 2 <= len(answers) <= MOST_ANSWERS:
        raise UserError(
            f"{file} has {len(answers)} answers: a classification has 2 to {MOST_ANSWERS}; name them by --answers, or "
            "take --task text"
        )
    return answers


def encode(lines: list[Line], answers: list[str], tokenizer: Any, limit: int) -> list[Prompt]:
    """The lines in tokens. limit: tokens that the model reads. UserError names a longer line, or an unknown answer."""
    for line in lines:
        if line.answer not in answers:
            raise UserError(
                f"{line.where} has the answer {line.answer!r}, which is none of {', '.join(map(repr, answers))}"
            )
    texts = [line.prompt + text for line in lines for text in ("", *answers)]
    tokens = iter(tokenizer(texts)["input_ids"])
    prompts = []
    for line in lines:
        prompt, *whole = (next(tokens) for _ in range(1 + len(answers)))
        n = len(commonprefix([prompt, *whole]))
        found = Prompt(whole[0][:n], [ids[n:] for ids in whole], answers.index(line.answer))
        if (longest := max(map(len, whole))) - 1 > limit:
            raise UserError(f"{line.where} has {longest} tokens with its answer, the model reads {limit}: shorten it")
        if not n or not all(found.ends):
            raise UserError(
                f"{line.where}: no token is the prompt's, or an answer's, alone: begin answers with a space"
            )
        prompts.append(found)
    return prompts


def collate(samples: Iterable[tuple[list[int], int]]) -> Batch:
    """(tokens, how many are the prompt's) each -> inputs and targets, int64 [batch, time], padded at the end. Targets
    are IGNORE except for an answer's tokens."""
    samples = list(samples)
    width = max(len(ids) for ids, _ in samples) - 1
    inputs = torch.zeros(len(samples), width, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORE)
    for i, (ids, n) in enumerate(samples):
        inputs[i, : len(ids) - 1] = torch.tensor(ids[:-1])
        targets[i, n - 1 : len(ids) - 1] = torch.tensor(ids[n:])
    return inputs, targets


class PromptDocuments:
    """Samples, (tokens, how many are the prompt's) each, as documents (language.lengths.dealt)."""

    def __init__(self, samples: list[tuple[list[int], int]]):
        self.samples, self.sample_size = samples, 1
        self.lengths = np.array([len(ids) - 1 for ids, _ in samples])
        self.targets = np.array([len(ids) - n for ids, n in samples])
        self.sizes = np.ones_like(self.lengths)
        self.about = f"{len(samples):,} prompts of {self.lengths.min():,} to {self.lengths.max():,} tokens"

    def read(self, number: int) -> Batch:
        """Inputs and targets, int64 [tokens] each."""
        inputs, targets = collate([self.samples[number]])
        return inputs[0], targets[0]


def log_likelihoods(model: nn.Module, samples: list[tuple[list[int], int]], device: torch.device) -> Tensor:
    """float64 [len(samples), 2]: the sum over each sample's answer, in nats, and the answer's tokens."""
    inputs, targets = (part.to(device) for part in collate(samples))
    found = model(inputs).logits.float().log_softmax(-1)
    wanted = targets != IGNORE
    each = found.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * wanted
    return torch.stack((each.double().sum(1), wanted.double().sum(1)), dim=1)


@torch.no_grad()
def answer_scores(model: nn.Module, prompts: list[Prompt], batch_size: int, device: torch.device) -> Iterator[Tensor]:
    """Of each prompt, float64 [answers, 2]: see log_likelihoods. The model reads at most batch_size samples at once, or
    those of one prompt."""
    each = len(prompts[0].ends) if prompts else 1
    for at in range(0, len(prompts), group := max(1, batch_size // each)):
        some = prompts[at : at + group]
        samples = [prompt.sample(answer) for prompt in some for answer in range(each)]
        yield from log_likelihoods(model, samples, device).cpu().view(-1, each, 2)


@dataclass(frozen=True)
class PromptTask:
    """What is learned: train and val in tokens, and the answers' texts."""

    tokenizer: Any
    answers: list[str]
    train: list[Prompt]
    val: list[Prompt]

    @classmethod
    def open(cls, recipe: FinetuneRecipe, folder: Path, tokenizer: Any, limit: int) -> PromptTask:
        """From train.jsonl and val.jsonl in the folder. limit: see encode."""
        train, val = (read_lines(folder / f"{split}.jsonl") for split in ("train", "val"))
        answers = answers_of(train, recipe.answers, folder / "train.jsonl")
        return cls(tokenizer, answers, *(encode(lines, answers, tokenizer, limit) for lines in (train, val)))

    @property
    def samples(self) -> int:
        return len(self.train)

    @property
    def documents(self) -> PromptDocuments:
        """The prompts with their right answers, to be dealt over rounds."""
        return PromptDocuments([prompt.sample() for prompt in self.train])

    def batches(self, recipe: FinetuneRecipe, rank: int, world_size: int, start: int, total: int) -> Iterator[Batch]:
        """This worker's batches of prompts with their right answers, of the steps from `start` to `total`."""
        samples: Any = [prompt.sample() for prompt in self.train]
        keys = ([i for *_, i in keys] for _, keys in train_keys(recipe, self.samples, rank, world_size, start, total))
        return load_batches(samples, keys, recipe.loader_workers, collate=collate)

    @repeated
    def evaluate(self, run: Run, model: nn.Module, *, at_end: bool) -> dict[str, float]:
        """The share of the held-out prompts whose right answer is the likeliest per token, and the loss."""
        recipe: Any = run.recipe
        val = self.val[: None if at_end else recipe.eval_samples]
        mine = [val[i] for i in eval_share(len(val), rank=run.rank, world_size=run.world_size)]
        right = nats = tokens = 0.0
        with run.paused(), run.autocast():
            for prompt, found in zip(mine, answer_scores(model, mine, recipe.batch_size, run.device), strict=True):
                right += float((found[:, 0] / found[:, 1]).argmax() == prompt.right)
                nats, tokens = nats - float(found[prompt.right, 0]), tokens + float(found[prompt.right, 1])
            if run.rank == 0:
                run.folder.writer.add_text("sample", self.sample(model, run.device), run.step)
        right, nats, tokens = run.sum(right, nats, tokens)
        name = "val" if len(val) == len(self.val) else "val_part"
        results = {f"{name}_accuracy": right / len(val), f"{name}_loss": nats / tokens, f"{name}_samples": len(val)}
        run.log_evaluation(results)
        return results

    def sample(self, model: nn.Module, device: torch.device) -> str:
        """Some prompts with each answer's probability per token, the right one in bold: Markdown."""
        rows = []
        some = self.val[:SAMPLES]
        for prompt, found in zip(some, answer_scores(model, some, len(self.answers), device), strict=True):
            shares = (found[:, 0] / found[:, 1]).exp().tolist()
            named = [f"{text.strip()} {share:.3f}" for text, share in zip(self.answers, shares, strict=True)]
            named[prompt.right] = f"**{named[prompt.right]}**"
            start = " ".join(self.tokenizer.decode(prompt.start).split())
            rows.append(f"{start} → {', '.join(named[:SHOWN])}")
        return "\n\n".join(rows)
