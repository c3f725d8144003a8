"""Elastic workers of several NCCL ranks on one GPU, each of which NCCL takes for a machine (test_nccl_ranks.py)."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import logged
from tests.training.test_islands import KILL, Target, elastic
from training.loop import run

pytestmark = pytest.mark.gpu


class OnOneGPU(Target):
    def __call__(self, *args: Any) -> None:
        ours = {"NCCL_HOSTID": f"rank{os.environ['RANK']}", "NCCL_SOCKET_IFNAME": "=lo", "NCCL_MNNVL_ENABLE": "0"}
        os.environ |= ours
        run.pick_device = lambda name: torch.device("cuda:0")  # not one for each LOCAL_RANK
        super().__call__(*args)


@pytest.mark.parametrize("harm", [None, ("step 3", KILL, 9), ("step 0", KILL, 8)], ids=["none", "follower", "leader"])
def test_all_nccl_ranks_of_all_islands_stay_equal(tmp_path: Path, harm: Any):
    found = elastic(tmp_path, harm, restarts=1, kind=OnOneGPU, device="cuda")
    assert len(found) == 4
    assert len(logged(tmp_path / "run", "workers")) == (2 if harm else 0)
