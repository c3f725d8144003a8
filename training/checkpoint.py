"""Beginning with what another run has trained."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from core.checkpoints.checkpoint import finished, load, unlike
from core.errors import UserError


def load_weights(model: nn.Module, folder: Path) -> None:
    """Gives the model the weights of the newest checkpoint of the run in `folder`; every worker must call it.

    UserError where there is none, or it is of another model.
    """
    checkpoints = folder.expanduser() / "checkpoints"
    if not finished(checkpoints):
        raise UserError(f"{folder} holds no checkpoint of a run: give the --out of one that has ended, or saved")
    found = load(checkpoints, rank=0)
    assert found is not None
    theirs, mine = found[0]["model"], model.state_dict()
    if differs := unlike(theirs, mine):
        raise UserError(f"{folder} is of another model: {differs}; give its --model and sizes")
    model.load_state_dict(theirs)
