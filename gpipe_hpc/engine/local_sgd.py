"""Local SGD and DiLoCo: replicas train on their own gradients and average parameters every H steps.

    step      1   2  ...  H    H+1 ...
    replica 0 t   t       t+A  t            t: a training step on the replica's own batch
    replica 1 t   t       t+A  t            A: an outer step on the mean change of the parameters

Sources: Stich, Local SGD converges fast and communicates little, 2018; Douillard et al., DiLoCo,
2023, and Streaming DiLoCo, 2025 (the model is averaged in `outer.parts` parts in turn, and averages
may arrive `outer.behind` steps later). A replica counts as much as the loss weights that it has
seen (McMahan et al., Federated averaging, 2017).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from gpipe_hpc.comm.collectives.group import CollectiveHandle, Group
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.data_parallel import BucketItem, Compression, ReduceStrategy, choose_strategy
from gpipe_hpc.engine.assembly import TiedParameter
from gpipe_hpc.engine.buffer_sync import BufferSynchronizer
from gpipe_hpc.engine.stage import Stage
from gpipe_hpc.engine.step_reduction import unite_flags
from gpipe_hpc.engine.wiring import Tables, Wiring
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.schedule import Op
from gpipe_hpc.settings import Outer

# Names in a checkpoint.
_ANCHOR: Final = "anchor."
_MOMENTUM: Final = "momentum."
_COMING: Final = "coming."
_SINCE: Final = "since_the_last_outer_step"


class Fragment:
    """Parameters of one bucket that are averaged together, and their outer optimizer.

    The anchor is a copy of the parameters after the last outer step, in float32 or wider, the same
    on all replicas. An outer step averages the change of each replica since then, ``anchor -
    parameter``, and passes it to SGD as the gradient of the anchor (DiLoCo, algorithm 1); rate 1
    without momentum gives the average of the parameters (local SGD).

    Args:
        named: The parameters by global name.
        strategy: How changes are summed over the copies; None if there is no other copy.
        outer: The settings.
        part: The part of the model that the fragment belongs to.
        copies: The ranks that hold the parameters.
        is_tied: Whether it is a tied parameter, which is summed uncompressed.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        strategy: ReduceStrategy | None,
        outer: Outer,
        part: int,
        copies: Group,
        *,
        is_tied: bool = False,
    ) -> None:
        self.part, self.copies, self.is_tied = part, copies, is_tied
        self._named, self._strategy, self._outer = dict(named), strategy, outer
        self._anchors: dict[str, Tensor] = {}
        self._momenta: dict[str, Tensor] = {}
        self._names: list[str] = []
        self._coming: Tensor | None = None
        self._pending: CollectiveHandle | None = None
        self.reset_anchor()

    @property
    def is_coming(self) -> bool:
        """Return whether an average was started and not applied yet."""
        return self._coming is not None

    def reset_anchor(self) -> None:
        """Copy the present parameters into the anchor, and clear the momentum."""
        self._anchors = {name: _wide(p).clone() for name, p in self._named.items()}
        self._momenta.clear()
        self._coming = self._pending = None

    def start(self, share: float, trained: Collection[str]) -> int:
        """Start averaging the parameters that were trained; return the bytes of the average.

        `share`: this copy's share of the average.
        """
        assert self._coming is None, "the previous average was applied"
        self._names = [name for name in self._named if name in trained]
        if not self._names:
            return 0
        changes = [self._anchors[name] - _wide(self._named[name]) for name in self._names]
        self._coming = torch.cat([each.reshape(-1) for each in changes]).mul_(share)
        if self._strategy is not None:
            self._pending = self._strategy(self._coming, self._items())
        return self._coming.nbytes

    def _items(self) -> tuple[BucketItem, ...]:
        items, start = [], 0
        for name in self._names:
            parameter = self._named[name]
            items.append(BucketItem(name, parameter.shape, start, start + parameter.numel()))
            start += parameter.numel()
        return tuple(items)

    def finish(self, mix: float) -> None:
        """Do an outer step with the average, if one was started, and set the parameters.

        `mix`: weight of the replica's present values in the new parameters.
        """
        self._wait()
        if self._coming is None:
            return
        change, self._coming = self._coming, None
        with torch.no_grad():
            for item in self._items():
                part = change[item.start : item.stop].view(item.shape)
                anchor = self._step(item.name, part)
                parameter = self._named[item.name]
                mixed = _wide(parameter) * mix + anchor * (1 - mix) if mix else anchor
                parameter.copy_(mixed)

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def _step(self, name: str, gradient: Tensor) -> Tensor:
        """Update the anchor as torch.optim.SGD does, and return it."""
        outer, anchor = self._outer, self._anchors[name]
        if outer.momentum:
            momentum = self._momenta.setdefault(name, torch.zeros_like(anchor))
            momentum.mul_(outer.momentum).add_(gradient)
            gradient = gradient + outer.momentum * momentum if outer.nesterov else momentum
        return anchor.sub_(gradient, alpha=outer.lr)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, equal on all copies; waits for the average."""
        self._wait()
        found = {_ANCHOR + name: each for name, each in self._anchors.items()}
        found |= {_MOMENTUM + name: each for name, each in self._momenta.items()}
        if self._coming is not None:
            for item in self._items():
                part = self._coming[item.start : item.stop].view(item.shape)
                found[_COMING + item.name] = part
        return found

    def wanted(self, stored: Collection[str]) -> list[str]:
        """Return which tensors of a checkpoint `restore` needs."""
        kinds = (_ANCHOR, _MOMENTUM, _COMING)
        return [k + name for name in self._named for k in kinds if k + name in stored]

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the tensors of a checkpoint, after the parameters were loaded."""
        self.reset_anchor()
        for name, anchor in self._anchors.items():
            if _ANCHOR + name in tensors:
                anchor.copy_(tensors[_ANCHOR + name])
            if _MOMENTUM + name in tensors:
                self._momenta[name] = tensors[_MOMENTUM + name].to(anchor, copy=True)
        self._names = [name for name in self._named if _COMING + name in tensors]
        if self._names:
            parts = [tensors[_COMING + name].reshape(-1) for name in self._names]
            self._coming = torch.cat(parts)


def _wide(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's values in float32, or in its own dtype if that is wider."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))


class LocalSgd:
    """Averages parameters and buffers of a rank's stages over the replicas at outer steps.

    A replica counts as much as the loss weights that it has seen since the last outer step. So if
    each step is an outer step, the average of the replicas' means is the mean of the whole batch,
    however unequal their shares. Buffers that forwards change are combined as `buffers` says (see
    `BufferSynchronizer`) whenever the average of the first part starts, including running
    statistics of BatchNorm.

    Args:
        outer: The settings.
        rank: The world rank.
        mesh: Ranks by replica and stage.
        tables: The tables of the run, one of them for outer steps.
        stages: The stages of the rank.
        wiring: The groups of the copies of each stage.
        tied: The tied parameters of the rank.
        compression: How changes are compressed.
        buffers: How buffers are combined.
    """

    def __init__(
        self,
        outer: Outer,
        rank: int,
        mesh: Mesh,
        tables: Tables,
        stages: Mapping[int, Stage],
        wiring: Wiring,
        tied: Sequence[TiedParameter],
        compression: Compression,
        buffers: str,
    ) -> None:
        self._outer, self._stages, self._compression = outer, stages, compression
        self._copies = wiring.copies
        self._device = device = next(iter(stages.values())).device
        self._replica, self._num_replicas = mesh.replica_of(rank), mesh.replicas
        strategies = _strategies(outer, stages, wiring.copies, compression)
        stage_rank = mesh.stage_rank_of(rank)
        # In the order in which their averages start.
        self._fragments = list(
            _fragments(outer, stage_rank, tables, stages, wiring.copies, strategies)
        )
        for tie in tied:
            strategy = choose_strategy(outer, tie.copies, is_tied=True)
            named = {tie.name: tie.parameter}
            fragment = Fragment(named, strategy, outer, 0, tie.copies, is_tied=True)
            self._fragments.append(fragment)
        self._buffer_syncs = {
            index: BufferSynchronizer(
                stage.layers, wiring.copies[index], rank, buffers, stage.device, pooled=True
            )
            for index, stage in stages.items()
        }
        # Since the last average of each part: the loss weight of each replica, and the number of
        # steps. The same on all ranks.
        size = outer.parts, self._num_replicas + 1
        self._since = torch.zeros(size, dtype=torch.float64, device=device.torch)
        self._unit = torch.ones((), dtype=torch.float64, device=device.torch)
        self._trained: set[str] = set()
        self._is_united = not outer.behind
        self.sent_bytes = 0

    def begin(self) -> None:
        """Begin a run of a table: note the versions of buffers."""
        for sync in self._buffer_syncs.values():
            sync.begin()

    def end(self, samples: Mapping[int, int]) -> None:
        """End a run of a table; `samples`: the number of samples that passed each stage."""
        for index, sync in self._buffer_syncs.items():
            sync.end(samples.get(index, 0))

    def report_buffers(self) -> None:
        """Log pending messages about buffers; waits for the device."""
        for sync in self._buffer_syncs.values():
            sync.log_pending()

    def note(self, weights: Tensor) -> None:
        """Note a training step: the loss weights of all replicas, float64[replicas]."""
        self._since[:, :-1] += weights
        self._since[:, -1] += 1
        self._is_united = False
        for stage in self._stages.values():
            named = stage.named_parameters().items()
            self._trained |= {name for name, each in named if each.requires_grad}

    @property
    def _may_be_coming(self) -> bool:
        return self._outer.behind > 0 and not self._is_united

    @property
    def replicas_differ(self) -> bool:
        """Return whether replicas may have different parameters; waits for the device."""
        return self._may_be_coming or bool(_trained_parts(self._device.to_host(self._since)))

    def is_due(self, step: int) -> bool:
        """Return whether an average starts or arrives after step number `step`, from 1 on."""
        parts = range(self._outer.parts)
        return any(self._starts(part, step) or self._arrives(part, step) for part in parts)

    def _starts(self, part: int, step: int) -> bool:
        """Return whether the average of a part starts after a step."""
        every = self._outer.every
        return step > 0 and (step + part * every // self._outer.parts) % every == 0

    def _arrives(self, part: int, step: int) -> bool:
        return self._starts(part, step - self._outer.behind)

    def step(self, step: int) -> bool:
        """Start and apply averages that are due after a step; return whether any was applied.

        The host waits for the device once, if an average starts.
        """
        outer = self._outer
        self._compression.begin(step, self._unit)
        arriving = [each for each in self._fragments if self._arrives(each.part, step)]
        starting = [each for each in self._fragments if self._starts(each.part, step)]
        if outer.behind:
            for fragment in arriving:
                fragment.finish(outer.mix)
        # Also parts of which this rank has no fragment.
        parts = [part for part in range(outer.parts) if self._starts(part, step)]
        since = self._device.to_host(self._since) if parts else self._since
        weight = self._weight(since) if 0 in parts else None
        for fragment in starting:
            # If an average is still coming: it is of another layout, with other parts.
            fragment.finish(outer.mix)
            self._start(fragment, since[fragment.part, :-1])
        for part in parts:
            self._since[part] = 0
        if not outer.behind:
            for fragment in starting:
                fragment.finish(0.0)
        if 0 in parts:
            self._combine_buffers(weight)
        return bool(arriving)

    def unite(self, step: int) -> bool:
        """Make all replicas equal after step number `step`; return whether they could differ.

        Averages that are on their way arrive, and each part that was trained since its last average
        has an outer step at once.
        """
        self._compression.begin(step, self._unit)
        since = self._device.to_host(self._since)
        parts = _trained_parts(since)
        if not parts and not self._may_be_coming:
            return False
        weight = self._weight(since)
        for fragment in [each for each in self._fragments if each.is_coming]:
            # If a part was not trained since, no replica has values of its own to keep.
            fragment.finish(self._outer.mix if fragment.part in parts else 0.0)
        starting = [each for each in self._fragments if each.part in parts]
        for fragment in starting:
            self._start(fragment, since[fragment.part, :-1])
        self._since.zero_()
        for fragment in starting:
            fragment.finish(0.0)
        self._is_united = True
        self._combine_buffers(weight)
        return True

    def _weight(self, since: Tensor) -> float | None:
        """Return this replica's weight in averages of buffers; None if no replica has any."""
        weights = since[0, :-1]
        return float(weights[self._replica]) if weights.sum() > 0 else None

    def _start(self, fragment: Fragment, weights: Tensor) -> None:
        """Start the average of a fragment; `weights`: those of the replicas, on the host."""
        total = float(weights.sum())
        # A replica that has seen no weight does not count; if none has seen any, all count equally.
        share = float(weights[self._replica]) / total if total > 0 else 1 / self._num_replicas
        size = fragment.copies.size
        num_bytes = fragment.start(share * self._num_replicas / size, self._trained)
        if self._outer.compress == "none" or fragment.is_tied:  # else the compression counts
            self.sent_bytes += 2 * (size - 1) * num_bytes // size  # as a ring sends them

    def _combine_buffers(self, weight: float | None) -> None:
        for index, sync in self._buffer_syncs.items():
            flags, copies = sync.flags(), self._copies[index]
            if flags:
                self._compression.wait_until_idle(copies)
            sync.settle(unite_flags(flags, copies), weight)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, equal on all replicas; waits for averages."""
        found = {name: t for each in self._fragments for name, t in each.state().items()}
        return found | {_SINCE: self._since}

    def wanted(self, stored: Collection[str]) -> list[str]:
        """Return which tensors of a checkpoint `restore` needs."""
        own = [_SINCE] if _SINCE in stored else []
        return own + [name for each in self._fragments for name in each.wanted(stored)]

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the tensors of a checkpoint, after the parameters were loaded.

        Missing state starts from the parameters. So do the weights if the checkpoint is of another
        number of replicas, whose parameters are then all equal.
        """
        for fragment in self._fragments:
            fragment.restore(tensors)
        kept = tensors.get(_SINCE)
        if kept is not None and kept.shape == self._since.shape:
            self._since.copy_(kept)
        else:
            self._since.zero_()
        self._is_united = not self._outer.behind
        for sync in self._buffer_syncs.values():
            sync.suspect_all()


def _trained_parts(since: Tensor) -> set[int]:
    """Return the parts that were trained since their last average; `since` is on the host."""
    return {part for part, num_steps in enumerate(since[:, -1].tolist()) if num_steps > 0}


def _strategies(
    outer: Outer,
    stages: Mapping[int, Stage],
    copies: Mapping[int, Group],
    compression: Compression,
) -> dict[int, ReduceStrategy | None]:
    """Return for each stage the strategy that sums changes over its copies."""
    found: dict[int, ReduceStrategy | None] = {}
    chosen: dict[Group, ReduceStrategy | None] = {}
    for index, stage in sorted(stages.items()):  # in one order on all ranks that share stages
        group = copies[index]
        if outer.compress != "none":
            found[index] = compression.reduction(index, stage.gradients, group, is_wide=True).start
            continue
        if group not in chosen:
            chosen[group] = choose_strategy(outer, group)
        found[index] = chosen[group]
    return found


def _fragments(
    outer: Outer,
    stage_rank: int,
    tables: Tables,
    stages: Mapping[int, Stage],
    copies: Mapping[int, Group],
    strategies: Mapping[int, ReduceStrategy | None],
) -> Iterator[Fragment]:
    """Yield the fragments of a rank, in the order of AVERAGE actions in its table."""
    assert tables.averaging is not None, "local SGD has a table of outer steps"
    places = [(s, number) for s, each in enumerate(tables.buckets) for number in range(len(each))]
    if len(places) < outer.parts:
        raise ConfigError(
            f"outer.parts: expected at most {len(places)}, the number of buckets of the model's "
            f"parameters, got {outer.parts}; lower it, or outer.bucket_bytes={outer.bucket_bytes:g}"
        )
    part_of = {place: number % outer.parts for number, place in enumerate(places)}
    for action in tables.averaging.ranks[stage_rank]:
        if action.op is not Op.AVERAGE:
            continue
        index = action.stage
        buckets = tables.buckets[index]
        named = stages[index].gradients.named
        for number in range(len(buckets)) if action.bucket is None else [action.bucket]:
            yield Fragment(
                {name: named[name] for name in buckets[number]},
                strategies[index],
                outer,
                part_of[index, number],
                copies[index],
            )
