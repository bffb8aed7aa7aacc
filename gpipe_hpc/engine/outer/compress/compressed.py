"""The way to sum buckets by a compressor, with error feedback."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import torch

from gpipe_hpc.comm.group import Group, Pending
from gpipe_hpc.engine.outer.compress.beside import Beside
from gpipe_hpc.engine.outer.compress.compressor import Compressor, Task
from gpipe_hpc.engine.outer.compress.residuals import Residuals
from gpipe_hpc.engine.outer.items import Item
from gpipe_hpc.models import message_key

_RESIDUAL: Final = re.compile(r"residual\.(.*)\.(\d+)_of_(\d+)")
_KEPT: Final = "compressor."


class Compressed:
    """Sum the buckets of one stage over its copies, each copy adding what it lost before.

    Residuals are kept in units of the gradient of the summed loss: what a backward starts from, a
    power of two, may change from step to step, so they are multiplied and divided by it, which
    changes no bit. A parameter that this replica has not used in a step keeps its residual: where
    nobody used it, its gradient is None, and what was sent would be lost.

    `jobs`: what carries out the sums over `group` beside compute, one after the other: one for
    all stages that share the group. `may_skip`: steps may be skipped for an overflow; then
    residuals go back to what they were.
    """

    def __init__(
        self,
        compressor: Compressor,
        group: Group,
        jobs: Beside,
        *,
        stage: int,
        seed: int,
        may_skip: bool,
    ) -> None:
        self._compressor, self._group, self._jobs = compressor, group, jobs
        self._stage, self._seed, self._may_skip = stage, seed, may_skip
        self._residuals = Residuals()
        self._step, self._number = 0, 0
        self._unit = torch.ones(())
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._kept_before: dict[str, torch.Tensor] = {}

    def begin(self, step: int, unit: torch.Tensor) -> None:
        """Begin a step whose backward starts from `unit`, a scalar."""
        self._step, self._number, self._unit = step, 0, unit
        self._before.clear()
        self._kept_before = dict(self._compressor.state())

    def start(self, flat: torch.Tensor, items: Sequence[Item] = ()) -> Pending:
        """Start summing in place; all copies get the same bits."""
        own = self._residuals.of(items, flat)
        if self._may_skip:
            self._before.append((own, own.clone()))
        words = (self._seed, self._step, self._group.position, self._stage, self._number)
        self._number += 1
        task = Task(self._group, tuple(items), message_key(*words))
        unit = self._unit.to(device=flat.device, dtype=own.dtype)
        used = (flat, own, unit)
        return self._jobs.start(lambda: self._sum(flat, own, task, unit), used)

    def _sum(self, flat: torch.Tensor, own: torch.Tensor, task: Task, unit: torch.Tensor) -> None:
        kept = [
            (part, part.clone())
            for part in (own[i.start : i.stop] for i in task.items if not i.is_used)
        ]
        own.mul_(unit).add_(flat)
        for part, _ in kept:
            part.zero_()
        flat.copy_(self._compressor.sum(own, task))
        # What is not finite was sent; kept, it would spoil every step to come.
        own.div_(unit).nan_to_num_(0.0, 0.0, 0.0)
        for part, before in kept:
            part.add_(before)

    def settle(self, *, is_kept: bool) -> None:
        """End a step; one that is not kept has changed nothing."""
        if not is_kept:
            assert self._may_skip, "steps are skipped where the loss is scaled"
            for own, before in self._before:
                own.copy_(before)
            self._compressor.restore(self._kept_before)
        self._before.clear()

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint keeps: residuals by copy, and what the compressor keeps."""
        own = self._own_copy
        residuals = {residual_name(n, own): t for n, t in self._residuals.named().items()}
        return residuals | {_KEPT + n: t for n, t in self._compressor.state().items()}

    def wanted(self, stored: Collection[str], parameters: Collection[str]) -> list[str]:
        """Return which of the tensors of a checkpoint `restore` needs for these parameters."""
        found = [_KEPT + name for name in parameters if _KEPT + name in stored]
        for name, copies in _residuals_in(stored).items():
            if name in parameters:
                wanted = [self._own_copy] if self._own_copy in copies else copies
                found += [residual_name(name, copy) for copy in wanted]
        return found

    def restore(self, tensors: Mapping[str, torch.Tensor], parameters: Collection[str]) -> None:
        """Go on with what a checkpoint kept.

        Of another number of copies, each takes an equal part of the sum of all residuals: nothing
        is lost.
        """
        named = {}
        for name, copies in _residuals_in(tensors).items():
            if name not in parameters:
                continue
            if self._own_copy in copies:
                named[name] = tensors[residual_name(name, self._own_copy)]
            else:
                parts = [tensors[residual_name(name, copy)] for copy in copies]
                named[name] = torch.stack(parts).sum(0) / self._group.size
        self._residuals.restore(named)
        kept = {n.removeprefix(_KEPT): t for n, t in tensors.items() if n.startswith(_KEPT)}
        self._compressor.restore({n: t for n, t in kept.items() if n in parameters})

    @property
    def _own_copy(self) -> "Copy":
        return Copy(self._group.position, self._group.size)


class Copy(NamedTuple):
    """One of the copies of a stage."""

    number: int
    of: int


def residual_name(parameter: str, copy: Copy) -> str:
    """Return under which name a checkpoint keeps a copy's residual of a parameter."""
    return f"residual.{parameter}.{copy.number}_of_{copy.of}"


def _residuals_in(names: Iterable[str]) -> dict[str, list[Copy]]:
    """Return whose residuals are among the names of a checkpoint, by parameter."""
    found: dict[str, list[Copy]] = {}
    for match in filter(None, map(_RESIDUAL.fullmatch, names)):
        found.setdefault(match[1], []).append(Copy(int(match[2]), int(match[3])))
    return {name: sorted(copies) for name, copies in found.items()}
