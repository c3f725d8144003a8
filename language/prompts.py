"""Classification by prompts, as in MeZO (Malladi et al., arXiv 2305.17333).

Each line of a file has a prompt and its right answer, `{"prompt": "a gorgeous film. It was", "answer": " great"}`. The
two are joined as they are. Only the answer's tokens count in the loss. As in MeZO's evaluation, a model chooses the
answer with the largest log-likelihood per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from core.checkpoint.stored import parse_json
from core.errors import UserError
from language.data import IGNORE, Batch
from language.finetune_recipes import FinetuneRecipe
from language.lengths.dealt import Documents
from training.data.samples import eval_share, load_batches, train_keys
from training.elastic import repeated
from training.loop.run import Run
from training.start.errors import explained

MOST_ANSWERS = 100  # answers of a classification; each is tried on every held-out prompt


@dataclass(frozen=True)
class Prompt:
    """A prompt in tokens, with all answers.

    Attributes:
        start: The prompt's tokens. If its last token joins an answer's first one, `start` ends before that token.
        ends: The tokens after `start` for each answer.
        right: Index of the right answer.
    """

    start: list[int]
    ends: list[list[int]]
    right: int

    def sample(self, answer: int | None = None) -> tuple[list[int], int]:
        """Returns the tokens of the prompt with an answer (default: the right one), and the number of prompt tokens."""
        return self.start + self.ends[self.right if answer is None else answer], len(self.start)


class Line(NamedTuple):
    """A line of a prompt file, and its place."""

    where: str
    prompt: str
    answer: str


def read_lines(file: Path) -> list[Line]:
    """Returns the lines of a prompt file that are not empty. A UserError names a line that is damaged."""
    if not file.is_file():
        raise UserError(f'{file} is missing: it should have {{"prompt": ..., "answer": ...}} a line')
    try:
        texts = file.read_text(encoding="utf-8-sig").split(
            "\n"
        )  # JSON may contain the other separators of splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text ({error.reason}): convert it") from None
    lines = []
    for where, text in ((f"{file} line {n}", text) for n, text in enumerate(texts, 1) if text.strip()):
        with explained(f"{where} is no JSON", "correct it"):
            found = parse_json(text)
        for key in ("prompt", "answer"):
            value = found.get(key) if isinstance(found, dict) else None
            if not isinstance(value, str) or not value.strip():
                raise UserError(f'{where} has no text as its "{key}": add it')
        lines.append(Line(where, found["prompt"], found["answer"]))
    if not lines:
        raise UserError(f"{file} holds no prompt: give one or more")
    return lines


def answers_of(lines: list[Line], given: tuple[str, ...], file: Path) -> list[str]:
    """Returns the answers to choose from: the given ones, or all answers in the training file, sorted."""
    answers = list(given) or sorted({line.answer for line in lines})
    if not 2 <= len(answers) <= MOST_ANSWERS:
        raise UserError(
            f"{file} has {len(answers)} answers: a classification has 2 to {MOST_ANSWERS}; name them by --answers, or "
            "use --task text"
        )
    return answers


def encode(lines: list[Line], answers: list[str], tokenizer: Any, limit: int) -> list[Prompt]:
    """Returns the lines of a prompt file in tokens, of which the model reads at most `limit`.

    Raises:
        UserError: Names a line that is too long, or an unknown answer.
    """
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
    """Returns inputs and targets, int64 [batch, time], padded at the end, from (tokens, number of prompt tokens).

    Targets are IGNORE except for an answer's tokens.
    """
    samples = list(samples)
    width = max(len(ids) for ids, _ in samples) - 1
    inputs = torch.zeros(len(samples), width, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORE)
    for i, (ids, n) in enumerate(samples):
        inputs[i, : len(ids) - 1] = torch.tensor(ids[:-1])
        targets[i, n - 1 : len(ids) - 1] = torch.tensor(ids[n:])
    return inputs, targets


def prompt_documents(samples: list[tuple[list[int], int]]) -> Documents:
    """The samples, each (tokens, number of prompt tokens), as documents."""
    lengths = np.array([len(ids) - 1 for ids, _ in samples])
    targets = np.array([len(ids) - n for ids, n in samples])
    about = f"{len(samples):,} prompts of {lengths.min():,} to {lengths.max():,} tokens"

    def read(number: int) -> Batch:
        inputs, wanted = collate([samples[number]])
        return inputs[0], wanted[0]

    return Documents(lengths, targets, np.ones_like(lengths), 1, about, read)


@torch.no_grad()
def answer_scores(model: nn.Module, prompts: list[Prompt], batch_size: int, device: torch.device) -> Iterator[Tensor]:
    """Yields the scores of each prompt's answers, float64 [answers, 2]: summed log-likelihood in nats, and tokens.

    The model reads at most batch_size samples at once, or the samples of one prompt.
    """
    each = len(prompts[0].ends) if prompts else 1
    for at in range(0, len(prompts), group := max(1, batch_size // each)):
        some = prompts[at : at + group]
        samples = [prompt.sample(answer) for prompt in some for answer in range(each)]
        inputs, targets = (part.to(device) for part in collate(samples))
        wanted = targets != IGNORE
        of_tokens = model(inputs).logits.float().log_softmax(-1)
        found = of_tokens.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * wanted
        yield from torch.stack((found.double().sum(1), wanted.double().sum(1)), dim=1).cpu().view(-1, each, 2)


@dataclass(frozen=True)
class PromptTask:
    """The data of a classification by prompts: train and val in tokens."""

    train: list[Prompt]
    val: list[Prompt]

    @classmethod
    def open(cls, recipe: FinetuneRecipe, folder: Path, tokenizer: Any, limit: int) -> PromptTask:
        """Opens train.jsonl and val.jsonl in the folder. See encode for `limit`."""
        train, val = (read_lines(folder / f"{split}.jsonl") for split in ("train", "val"))
        answers = answers_of(train, recipe.answers, folder / "train.jsonl")
        return cls(*(encode(lines, answers, tokenizer, limit) for lines in (train, val)))

    @property
    def samples(self) -> int:
        return len(self.train)

    @property
    def documents(self) -> Documents:
        """The prompts with their right answers, as documents."""
        return prompt_documents([prompt.sample() for prompt in self.train])

    def batches(self, recipe: FinetuneRecipe, rank: int, world_size: int, start: int, total: int) -> Iterator[Batch]:
        """Yields this worker's batches of prompts with their right answers, from step `start` to `total`."""
        samples: Any = [prompt.sample() for prompt in self.train]
        keys = ([i for *_, i in keys] for _, keys in train_keys(recipe, self.samples, rank, world_size, start, total))
        return load_batches(samples, keys, recipe.loader_workers, collate=collate)

    @repeated
    def evaluate(self, run: Run, model: nn.Module, *, at_end: bool) -> dict[str, float]:
        """Returns the share of held-out prompts whose right answer is the likeliest per token, and the loss."""
        recipe: Any = run.recipe
        val = self.val[: None if at_end else recipe.eval_samples]
        mine = [val[i] for i in eval_share(len(val), rank=run.rank, world_size=run.world_size)]
        right = nats = tokens = 0.0
        with run.paused(), run.autocast():
            for prompt, found in zip(mine, answer_scores(model, mine, run.eval_batch, run.device), strict=True):
                right += float((found[:, 0] / found[:, 1]).argmax() == prompt.right)
                nats, tokens = nats - float(found[prompt.right, 0]), tokens + float(found[prompt.right, 1])
        right, nats, tokens = run.sum(right, nats, tokens)
        name = "val" if len(val) == len(self.val) else "val_part"
        results = {f"{name}_accuracy": right / len(val), f"{name}_loss": nats / tokens, f"{name}_samples": len(val)}
        run.log_evaluation(results)
        return results
