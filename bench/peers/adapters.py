"""Methods of other packages, run by those packages' own code, as bench.time_to_loss calls them.

Nothing here reimplements a package's method. Each function configures a package as its documentation says, for the
period that the benchmark compares. Functions import their packages, so a missing one costs nothing but its row.
"""

import importlib.util
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core.groups import of_all


def nothing(*_: Any, **__: Any) -> None:
    """Does nothing, for methods without such a call."""


@dataclass
class Trainer:
    """A model and its method, as the training loop calls them.

    Attributes:
        optimizer: The loop calls its step and zero_grad, and sets the learning rate of its param_groups.
        after_step: Follows every step; `last` says whether it is the run's last.
        finish: Ends the training, inside the clock.
        close: Frees ports and processes, outside the clock.
        stats: The method's own measurements, as entries of a row.
    """

    model: nn.Module
    optimizer: Any
    after_step: Callable[..., Any] = nothing
    finish: Callable[[], Any] = nothing
    close: Callable[[], Any] = nothing
    stats: Callable[[], dict[str, Any]] = dict


@dataclass(frozen=True)
class Task:
    """The arguments of a package: a model with equal values on all workers, and its inner optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    tau: int
    timeout: float  # seconds until a missing worker is an error


@dataclass(frozen=True)
class Peer:
    """A method of another package: its distribution, and the function that starts it."""

    package: str
    start: Callable[[Task], Trainer]

    def missing(self) -> str:
        """Why the method cannot run here. Empty if its package is installed."""
        module = self.package.partition("-")[0]
        return "" if importlib.util.find_spec(module) else f"package {self.package} is not installed"


# -- torch ----------------------------------------------------------------------------------------------------


def fp16_compress(task: Task) -> Trainer:
    """DDP whose gradients travel as float16, with its default buckets, during the backward pass."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(task.model)
    model.register_comm_hook(None, fp16_compress_hook)
    return Trainer(model, task.optimizer)


def powersgd(task: Task, rank: int = 4) -> Trainer:
    """DDP whose gradients travel as matrices of low rank from step 2 on, with error feedback.

    PowerSGD: Vogels et al., NeurIPS 2019. One bucket holds all gradients. The hook waits for a second all-reduce in the
    callback of the first one. gloo has two threads for callbacks and all-reduces, and two buckets that do this at once
    would lock it up.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    state = PowerSGDState(process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    model = DistributedDataParallel(task.model, bucket_cap_mb=1 << 14)
    model.register_comm_hook(state, powerSGD_hook)
    return Trainer(model, task.optimizer)


# -- torchft --------------------------------------------------------------------------------------------------


def own_address() -> str:
    """This node's IPv4 address, as seen on the way to rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing
        return probe.getsockname()[0]


def shared(make: Callable[[], Any]) -> Any:
    """Returns the JSON value that rank 0 made, on every rank."""
    return of_all(make() if dist.get_rank() == 0 else None)[0]


def torchft_manager(task: Task) -> tuple[Any, Callable[[], None]]:
    """Returns a torchft manager, and a function that ends it.

    Each worker is a replica group of one, and the lighthouse is on rank 0.
    """
    address = own_address()
    socket.gethostname = lambda: address  # torchft advertises this name, and a node's name is in nobody's DNS
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    patience = timedelta(seconds=task.timeout)
    server: Any = LighthouseServer(bind="[::]:0", min_replicas=dist.get_world_size()) if dist.get_rank() == 0 else None
    lighthouse = shared(lambda: f"http://{address}:{server.address().rpartition(':')[2]}")
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=patience)
    manager = Manager(
        pg=group,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=dist.get_world_size(),
        use_async_quorum=False,  # DiLoCo requires it
        init_sync=False,  # every worker starts from the same values
        timeout=patience,
        quorum_timeout=patience,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"worker{dist.get_rank()}",
        hostname=address,
    )

    def end() -> None:
        dist.barrier()  # a worker that leaves early would make the others form a new quorum
        manager.shutdown(wait=False)
        group.shutdown()
        if server is not None:
            server.shutdown()

    return manager, end


def streaming_diloco(task: Task) -> Trainer:
    """Streaming DiLoCo (Douillard et al., 2025), with the longest delay that torchft permits.

    Each of two consecutive parts of the model is synchronized once in tau steps.
    """
    manager, end = torchft_manager(task)
    from torchft.local_sgd import DiLoCo

    parts, delay = split(task.model, 2), max(0, task.tau // 2 - 1)
    outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts]
    context = DiLoCo(manager, parts, task.optimizer, outer, sync_every=task.tau, fragment_sync_delay=delay)
    context.__enter__()
    finish = lambda: context.__exit__(None, None, None)  # noqa: E731
    stats = lambda: {"rounds": manager.current_step()}  # noqa: E731
    return Trainer(task.model, task.optimizer, finish=finish, close=end, stats=stats)


def split(model: nn.Module, parts: int) -> list[nn.Module]:
    """Splits the modules that hold parameters, in order, into `parts` groups with about equally many parameters."""
    found: set[int] = set()  # a tied parameter belongs to its first module
    sizes: dict[nn.Module, int] = {}
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in found]
        found |= set(map(id, own))
        if own:
            sizes[module] = sum(p.numel() for p in own)
    groups = [nn.ModuleList() for _ in range(parts)]
    before, total = 0, sum(sizes.values())
    for module, size in sizes.items():
        groups[min(parts - 1, int((before + size / 2) * parts / total))].append(module)
        before += size
    assert sum(len(list(group.parameters())) for group in groups) == len(found), "modules with parameters are nested"
    return list(groups)


PEERS = {
    "torch_fp16": Peer("torch", fp16_compress),
    "torch_powersgd_rank4": Peer("torch", powersgd),
    "torchft_streaming": Peer("torchft-nightly", streaming_diloco),
}
