"""Makes a tuned model from the original model and a run's scalars, 8 bytes per step:

    python -m language.zo_replay OUT/replay --model FOLDER --out TUNED

With method zo, language.finetune writes OUT/replay. It has `scalars`, and `run.json` with the recipe and the SHA-256 of
the tuned tensors before and after. This command reads no data. TUNED equals OUT/model bit for bit, or is not written.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import nn

from core.checkpoint.stored import parse_json
from core.errors import UserError
from language import pretrained
from language.finetune_recipes import RECIPES, FinetuneRecipe
from language.zeroth import ScalarLog, ZerothOrder
from language.zeroth.order import Noise, digest
from training.start.errors import explained
from training.start.script import launch, parse_options
from training.weights.read import rebuilt

KEPT = ("weights", "seed", "zeroth", "lora")  # settings on which the tuned weights depend


def tuned_digest(model: nn.Module) -> str:
    """Returns the SHA-256 of the tensors that are tuned."""
    return digest([p.data for p in model.parameters() if p.requires_grad])


def write(folder: Path, recipe: FinetuneRecipe, zo: ZerothOrder, before: str) -> None:
    """Writes OUT/replay after a run. `before` is the tuned_digest of the initial model."""
    folder.mkdir(parents=True, exist_ok=True)
    zo.log.save(folder / "scalars")
    made = {"recipe": {key: value for key, value in asdict(recipe).items() if key in KEPT}}
    made |= {"before": before, "after": tuned_digest(zo.model), "noise": zo.weights.noise.kind}
    (folder / "run.json").write_text(json.dumps(made, indent=1) + "\n")


def read(folder: Path, model: Path) -> tuple[FinetuneRecipe, dict[str, Any]]:
    """Returns the recipe of the run in the folder, for the model that it was tuned from, and the rest of run.json."""
    file = folder / "run.json"
    if not file.is_file():
        raise UserError(f"{file} is missing: give the folder `replay` that a run of method zo has written")
    with explained(f"{file} is damaged", "copy it again"):
        made = parse_json(file.read_text())
        recipe = rebuilt(replace(RECIPES["prompts"], model=model), {key: made["recipe"][key] for key in KEPT})
        made["before"], made["after"], made["noise"]
        return recipe, made


def replay(run: Annotated[Path, tyro.conf.Positional], /, model: Path, out: Path) -> None:
    """Writes the model that a run of method zo has tuned.

    Args:
        run: The folder `replay` in the run's folder.
        model: The folder of the model that the run began with.
        out: The folder to write. It appears only when it is complete.
    """
    recipe, made = read(run, model)
    if out.exists():
        raise UserError(f"{out} exists already: remove it, or give another --out")
    device = torch.device("cuda" if torch.cuda.is_available() and made["noise"] != "cpu" else "cpu")
    if (here := Noise(0, device).kind) != made["noise"]:
        raise UserError(f"{run}: its noise was drawn on {made['noise']}, here it is {here}: replay it on such a device")
    log = ScalarLog.load(run / "scalars")
    tuned = pretrained.open_model(recipe).to(device)
    tokenizer = pretrained.open_tokenizer(model, tuned)
    if tuned_digest(tuned) != made["before"]:
        raise UserError(f"{model} is not the model that {run} was tuned from: give that one")
    ZerothOrder(tuned, recipe.zeroth, lr=0.0).replay(log)
    if tuned_digest(tuned) != made["after"]:
        raise UserError(f"{run}: its scalars do not lead to the model that it names: copy the folder again")
    pretrained.write_model(tuned, tokenizer, out)
    print(f"{out}: {len(log)} steps replayed, {tuned_digest(tuned)[:16]} as in the run")


if __name__ == "__main__":
    launch(lambda: parse_options(replay, description=__doc__))
