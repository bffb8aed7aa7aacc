"""When the replicas of a rank's stages meet, and what each counts for."""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import nn

from gpipe_hpc.comm.device import Device
from gpipe_hpc.comm.group import Group
from gpipe_hpc.engine.outer.apart.fragment import Fragment
from gpipe_hpc.engine.outer.settings import Outer

_SINCE: Final = "since_the_last_outer_step"


class Turn(NamedTuple):
    """A fragment, the part of the model it belongs to, and the group of its copies.

    `is_plain`: the backend sums it, so its bytes are reckoned, not counted.
    """

    fragment: Fragment
    part: int
    copies: Group
    is_plain: bool


class Met(NamedTuple):
    """What replicas did as they met.

    `has_averaged`: parameters were averaged and stepped on. `weight`: what this replica counted
    for where the first part left; None if it did not leave, or all saw nothing.
    """

    has_averaged: bool
    weight: float | None


class Rounds:
    """The outer steps of one rank.

    `turns`: its fragments, in the order in which their averages start. `replica` is one of
    `num_replicas`. A replica counts as much as the loss weights that it has seen since the last
    outer step (McMahan et al., Federated averaging, 2017): with one step from one to the next, the
    average of its own means is the mean of the whole batch, however unequal their shares.
    """

    def __init__(
        self,
        outer: Outer,
        turns: Sequence[Turn],
        replica: int,
        num_replicas: int,
        device: Device,
    ) -> None:
        self._outer, self._turns = outer, list(turns)
        self._replica, self._num_replicas = replica, num_replicas
        # Since each part last left, by replica, and how many steps that is: the same on all ranks.
        size = outer.parts, num_replicas + 1
        self._device = device
        self._since = torch.zeros(size, dtype=torch.float64, device=device.torch)
        self._trained: set[str] = set()
        self._is_united = not outer.behind
        self.sent_bytes = 0

    def note(self, weights: torch.Tensor, named: Mapping[str, nn.Parameter]) -> None:
        """Take note of a step: the loss weights of all replicas, float64[replicas]."""
        self._since[:, :-1] += weights
        self._since[:, -1] += 1
        self._is_united = False
        self._trained |= {name for name, each in named.items() if each.requires_grad}

    @property
    def _is_late(self) -> bool:
        """Say whether an average may be under way."""
        return self._outer.behind > 0 and not self._is_united

    @property
    def replicas_differ(self) -> bool:
        """Say whether replicas may have other parameters than one another."""
        return self._is_late or bool(_gone(self._device.fetch(self._since)))

    def is_due(self, step: int) -> bool:
        """Say whether something leaves or arrives behind step number `step`, counted from 1."""
        parts = range(self._outer.parts)
        return any(self._leaves(part, step) or self._arrives(part, step) for part in parts)

    def leaves_first(self, step: int) -> bool:
        """Say whether the first part leaves behind a step."""
        return self._leaves(0, step)

    def _weight(self, weights: torch.Tensor) -> float | None:
        """Return what this replica counts for, of `weights`; None if all saw nothing."""
        return float(weights[self._replica]) if weights.sum() > 0 else None

    def _leaves(self, part: int, step: int) -> bool:
        every = self._outer.every
        return step > 0 and (step + part * every // self._outer.parts) % every == 0

    def _arrives(self, part: int, step: int) -> bool:
        return self._leaves(part, step - self._outer.behind)

    def step(self, step: int) -> Met:
        """Do what is due behind that step. The host waits once, where a part leaves."""
        outer = self._outer
        arriving = [turn for turn in self._turns if self._arrives(turn.part, step)]
        leaving = [turn for turn in self._turns if self._leaves(turn.part, step)]
        if outer.behind:
            for turn in arriving:
                turn.fragment.finish(outer.mix)
        # Also those of which this rank has nothing.
        gone = [part for part in range(outer.parts) if self._leaves(part, step)]
        since = self._device.fetch(self._since) if gone else self._since
        weight = self._weight(since[0, :-1]) if 0 in gone else None
        for turn in leaving:
            # Of another layout, in which it was of another part.
            turn.fragment.finish(outer.mix)
            self._start(turn, since[turn.part, :-1])
        for part in gone:
            self._since[part] = 0
        if not outer.behind:
            for turn in leaving:
                turn.fragment.finish(0.0)
        return Met(bool(arriving), weight)

    def unite(self) -> Met:
        """Do early what is still to come, so that all replicas hold the same.

        Averages that are under way arrive, and each part that was trained since it left has its
        outer step now, at once.
        """
        since = self._device.fetch(self._since)
        gone = _gone(since)
        if not gone and not self._is_late:
            return Met(has_averaged=False, weight=None)
        weight = self._weight(since[0, :-1])
        coming = [turn for turn in self._turns if turn.fragment.is_coming]
        for turn in coming:
            # Of a part that was not trained since, no replica has anything of its own to keep.
            turn.fragment.finish(self._outer.mix if turn.part in gone else 0.0)
        leaving = [turn for turn in self._turns if turn.part in gone]
        for turn in leaving:
            self._start(turn, since[turn.part, :-1])
        self._since.zero_()
        for turn in leaving:
            turn.fragment.finish(0.0)
        self._is_united = True
        return Met(has_averaged=True, weight=weight)

    def _start(self, turn: Turn, weights: torch.Tensor) -> None:
        """Let a part leave; `weights`: those of the replicas since it last left, on the host."""
        total = float(weights.sum())
        # A replica that saw nothing counts nothing; where none saw anything all are alike.
        share = float(weights[self._replica]) / total if total > 0 else 1 / self._num_replicas
        size = turn.copies.size
        num_bytes = turn.fragment.start(share * self._num_replicas / size, self._trained)
        if turn.is_plain:  # as a ring sends them
            self.sent_bytes += 2 * (size - 1) * num_bytes // size

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint keeps, the same on all replicas; waits for what is under way."""
        found = {name: t for turn in self._turns for name, t in turn.fragment.state().items()}
        return found | {_SINCE: self._since}

    def wanted(self, stored: Collection[str]) -> list[str]:
        """Return which of the tensors of a checkpoint `restore` needs."""
        own = [_SINCE] if _SINCE in stored else []
        return own + [name for turn in self._turns for name in turn.fragment.wanted(stored)]

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on with what a checkpoint kept; the parameters are loaded.

        What it has not starts anew from the parameters; so do the weights of another number of
        replicas, whose parameters then are all alike.
        """
        for turn in self._turns:
            turn.fragment.restore(tensors)
        kept = tensors.get(_SINCE)
        if kept is not None and kept.shape == self._since.shape:
            self._since.copy_(kept)
        else:
            self._since.zero_()
        self._is_united = not self._outer.behind


def _gone(since: torch.Tensor) -> set[int]:
    """Return which parts were trained since they last left; `since` lies on the host."""
    return {part for part, num_steps in enumerate(since[:, -1].tolist()) if num_steps > 0}
