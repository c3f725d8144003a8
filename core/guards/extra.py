"""Tensors besides the trained ones: averages of an EMA model's and others, and copies of master weights in 16 bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from ..buckets import copy, is_dtensor, local_shard, unique, views
from ..comm import run, sum_flats
from ..errors import UserError, warn
from ..groups import compare
from ..hooks import Hook, HookedMethod
from .inputs import check_dense, overlapping, tensors_of
from .usage import writes

Tensors = Iterable[Tensor] | nn.Module
Given = Tensors | Callable[[], Tensors]


class ExtraAverage(Hook):
    """Averages extra tensors over the workers at finish(), and at sync_for_eval() if all workers then hold one model.

    It costs nothing in a round. One all-reduce sums the tensors in float32, and one more sums float64 tensors. All
    workers then hold the same bits. A worker does not count in the average of a tensor that is not finite there. A
    tensor that is finite on no worker stays as it is.
    """

    def __init__(self, given: Given):
        """
        Args:
            given: Tensors, a module whose parameters and buffers are averaged, or a function that returns either. The
                function is called at each average, so it suits tensors that an optimizer makes in its first step.
                Integer tensors are left as they are.
        """
        self._given: Given = given
        self.compared = "average= with a function"
        if isinstance(given, nn.Module) or not callable(given):
            self._given = found = averaged_tensors(given)
            if not found:
                raise UserError(
                    "average: no floating-point tensor is given: give a module, a list, or a function that returns one"
                )
            self.alike = [local_shard(t) for t in found]
            self.compared = f"average= with {len(found)} tensors"
        self._has_stepped = False

    def attach(self, method: HookedMethod) -> None:
        if not hasattr(self, "method"):
            self._first = writes(self.alike)  # to notice that nothing changes
        super().attach(method)
        self._check_overlap(self.alike)

    def before_allreduce(self) -> None:
        self._has_stepped |= self.method.local_steps > 0

    @torch.inference_mode(False)
    @torch.no_grad()
    def on_common_model(self, equal: bool) -> None:
        """Averages if the workers hold one model, which follows from their settings and the round."""
        allreduce = self.method.allreduce
        allreduce.check_alive()
        if equal and allreduce.group is not None:
            allreduce.in_foreground(self._average, "the average of average=")

    def _average(self) -> None:
        """Averages the tensors in place."""
        m, found = self.method, self._found()
        if self._first and self._has_stepped:  # once
            first, self._first = self._first, []
            if first == writes(self.alike):
                warn(
                    f"average: none of the {len(first)} tensors has changed in training: if the loop replaces "
                    "them, as average[name] = ... does, pass a function: average=lambda: list(average.values())"
                )
        whole = [t for t in found if not (m.node.separate or is_dtensor(t))]
        parts = [local_shard(t) for t in found if m.node.separate or is_dtensor(t)]
        for tensors, over_node in ((whole, True), (parts, False)):
            for wide in (torch.float32, torch.float64):
                of_kind = [t for t in tensors if (t.dtype == torch.float64) == (wide == torch.float64)]
                if of_kind:
                    self._mean(of_kind, wide, over_node=over_node)

    def _found(self) -> list[Tensor]:
        """Returns the tensors to average.

        UserError on all workers if tensors of one cannot be averaged, or differ in number, shape or dtype.
        """
        found, problem = list[Tensor](), ""
        try:
            found = averaged_tensors(self._given)
            self._check_overlap([local_shard(t) for t in found])
        except UserError as error:
            problem = str(error)
        except Exception as error:
            if self._has_stepped or not isinstance(error, KeyError):  # an optimizer's state begins empty
                problem = f"average: the function failed with {type(error).__name__}: {error}"
        group, node = self.method.allreduce.group, self.method.node
        assert group is not None
        try:
            compare((problem or "tensors for average=",), [local_shard(t) for t in found], group)
        except UserError as error:
            remedy = "an optimizer makes its tensors in its first step, so every worker must take one"
            problem = problem or f"average: {error}; {remedy}"
        failed = torch.tensor(float(bool(problem)), device=self.method.allreduce.device)
        run(node.sum([failed]))  # the results of the other workers of a node
        if failed:
            raise UserError(problem or "average: another worker of this node cannot average: see its message")
        return found

    def _mean(self, tensors: Sequence[Tensor], wide: torch.dtype, *, over_node: bool) -> None:
        """Averages local tensors with one all-reduce: their sums, and on how many workers each is finite.

        The sums have the dtype `wide`. With `over_node` they are also over the workers of a node.
        """
        m, allreduce = self.method, self.method.allreduce
        assert allreduce.group is not None
        finite = [bool(torch.isfinite(t.to(wide)).all()) for t in tensors]
        flat = torch.zeros(sum(t.numel() for t in tensors) + len(tensors), dtype=wide, device=allreduce.device)
        sums, weights = views(flat, tensors), flat[-len(tensors) :]
        counted = [pair for pair, counts in zip(zip(sums, tensors, strict=True), finite, strict=True) if counts]
        copy([total for total, _ in counted], [t for _, t in counted])
        weights.copy_(torch.tensor(finite, device="cpu"))
        run(iter([sum_flats([flat], allreduce.group)]))
        if over_node:
            run(m.node.sum([flat]))
        of_each, count = weights.tolist(), m.total_world_size if over_node else allreduce.world_size
        for t, total, weight in zip(tensors, sums, of_each, strict=True):
            if weight:
                t.copy_(total.div_(weight))
        if (few := sum(0 < weight < count for weight in of_each)) and m.is_log_rank:
            warn(f"average: {few} of {len(tensors)} tensors were not finite on some workers, which did not count there")

    def _check_overlap(self, tensors: Sequence[Tensor]) -> None:
        """Raises UserError if a tensor shares memory with a tensor that the method averages already."""
        if (t := overlapping(tensors, [t for b in self.method.buckets for t in (*b.params, *b.given)])) is not None:
            raise UserError(
                f"average: a tensor of shape {tuple(t.shape)} shares its memory with the parameters or buffers "
                f"that {self.method.name} averages already: leave it out"
            )


class MasterWeightSync(Hook):
    """Copies averaged float32 master weights to the 16-bit model that they belong to.

    Args:
        model_params: The model's parameters, in the order of their masters.
    """

    def __init__(self, model_params: Iterable[Tensor]):
        self.model_params = [local_shard(p) for p in model_params]

    def attach(self, method: HookedMethod) -> None:
        super().attach(method)
        given, masters = [p.shape for p in self.model_params], [p.shape for p in method.params]
        if given != masters:
            raise UserError(
                f"{len(given)} model_params for {len(masters)} parameters: give one of each shape, in their order"
            )
        self.after_param_update(at_boundary=True)

    @torch.no_grad()
    def after_param_update(self, *, at_boundary: bool) -> None:
        copy(self.model_params, self.method.params)


def averaged_tensors(given: Given) -> list[Tensor]:
    """Returns the floating-point tensors in average=, each once. UserError if one cannot be averaged."""
    if callable(given) and not isinstance(given, nn.Module):
        given = given()
    if isinstance(given, nn.Module):
        given = itertools.chain(given.parameters(), given.buffers())
    tensors = tensors_of(given, "average")
    check_dense(tensors, "average: a tensor")
    return unique([t for t in tensors if t.is_floating_point()])
