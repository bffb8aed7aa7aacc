"""What a rank of replicas that train apart does besides its steps."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from gpipe_hpc.comm.group import Group
from gpipe_hpc.comm.mesh import Mesh
from gpipe_hpc.engine.outer.apart.fragment import Fragment
from gpipe_hpc.engine.outer.apart.rounds import Rounds, Turn
from gpipe_hpc.engine.outer.buckets import Buckets
from gpipe_hpc.engine.outer.compress.compression import Compression
from gpipe_hpc.engine.outer.settings import Outer
from gpipe_hpc.engine.outer.ways import Way, choose_way, way_of_tie
from gpipe_hpc.engine.stages.stage import Stage
from gpipe_hpc.engine.stages.tables import Tables
from gpipe_hpc.engine.stages.wiring import Wiring
from gpipe_hpc.engine.state.drift import Drift
from gpipe_hpc.engine.sums.gradients import unite_flags
from gpipe_hpc.engine.sums.tied import TiedParameter
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.schedule import Op


class Apart:
    """Parameters and buffers of a rank's stages, averaged over replicas at outer steps.

    Buffers that forwards change follow `buffers` (see `Drift`), whenever the first part of the
    model leaves; running statistics of BatchNorm are among them.
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
        assert tables.averaging is not None, "replicas train apart"
        self._stages, self._compression = stages, compression
        self._copies = wiring.copies
        device = next(iter(stages.values())).device
        chosen: dict[Group, Way] = {}
        ways: dict[int, Way] = {}
        for index, stage in sorted(stages.items()):  # in one order on all ranks that share stages
            copies = wiring.copies[index]
            if outer.compress != "none":
                ways[index] = compression.way(stage, copies, wide=True)
                continue
            if copies not in chosen:
                chosen[copies] = choose_way(outer, copies)
            ways[index] = chosen[copies]
        turns = list(_turns(outer, mesh.stage_rank_of(rank), tables, stages, wiring, ways))
        for each in tied:
            way = way_of_tie(outer, each.copies)
            fragment = Fragment({each.name: each.parameter}, way, outer)
            turns.append(Turn(fragment, 0, each.copies, is_plain=True))
        self.rounds = Rounds(outer, turns, mesh.replica_of(rank), mesh.replicas, device)
        self._drifts = {
            index: Drift(
                stage.layers, wiring.copies[index], rank, buffers, stage.device, pooled=True
            )
            for index, stage in stages.items()
        }
        self._unit = torch.ones((), dtype=torch.float64, device=device.torch)

    def begin(self) -> None:
        """Begin a run of the table: note what buffers are like."""
        for drift in self._drifts.values():
            drift.begin()

    def end(self, samples: Mapping[int, int]) -> None:
        """End it, in which each stage has seen so many samples."""
        for index, drift in self._drifts.items():
            drift.end(samples.get(index, 0))

    def say_all(self) -> None:
        """Say what is left to be said of buffers; waits for the device."""
        for drift in self._drifts.values():
            drift.say_all()

    def note(self, weights: torch.Tensor) -> None:
        """Take note of a training step: the loss weights of all replicas, float64[replicas]."""
        named: dict[str, nn.Parameter] = {}
        for stage in self._stages.values():
            named |= stage.named_parameters()
        self.rounds.note(weights, named)

    def step(self, step: int) -> bool:
        """Do what is due behind step number `step`; say whether a part was averaged."""
        self._compression.begin(step, self._unit)
        met = self.rounds.step(step)
        if self.rounds.leaves_first(step):
            self._settle_buffers(met.weight)
        return met.has_averaged

    def unite(self, step: int) -> bool:
        """Let all replicas hold the same behind step number `step`; say whether they did not."""
        self._compression.begin(step, self._unit)
        met = self.rounds.unite()
        if met.has_averaged:
            self._settle_buffers(met.weight)
        return met.has_averaged

    def _settle_buffers(self, weight: float | None) -> None:
        for index, drift in self._drifts.items():
            flags, copies = drift.flags(), self._copies[index]
            if flags:
                self._compression.rest(copies)
            drift.settle(unite_flags(flags, copies), weight)

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint keeps, the same on all replicas."""
        return self.rounds.state()

    def wanted(self, stored: Collection[str]) -> list[str]:
        """Return which of the tensors of a checkpoint `restore` needs."""
        return self.rounds.wanted(stored)

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on with what a checkpoint kept; the parameters are loaded."""
        self.rounds.restore(tensors)
        for drift in self._drifts.values():
            drift.suspect_all()


def _turns(
    outer: Outer,
    stage_rank: int,
    tables: Tables,
    stages: Mapping[int, Stage],
    wiring: Wiring,
    ways: Mapping[int, Way],
) -> Iterator[Turn]:
    """Yield the fragments of a rank in the order of its list."""
    assert tables.averaging is not None, "replicas train apart"
    places = [(s, number) for s, each in enumerate(tables.buckets) for number in range(len(each))]
    if len(places) < outer.parts:
        raise ConfigError(
            f"outer.parts: expected at most the {len(places)} buckets that the model's parameters "
            f"make, got {outer.parts}; lower outer.bucket_bytes={outer.bucket_bytes:g}, or parts"
        )
    part_of = {place: number % outer.parts for number, place in enumerate(places)}
    for action in tables.averaging.ranks[stage_rank]:
        if action.op is not Op.AVERAGE:
            continue
        buckets: Buckets = tables.buckets[action.stage]
        numbers = range(len(buckets)) if action.bucket is None else [action.bucket]
        named = stages[action.stage].named_parameters()
        for number in numbers:
            yield Turn(
                Fragment({n: named[n] for n in buckets[number]}, ways[action.stage], outer),
                part_of[action.stage, number],
                wiring.copies[action.stage],
                is_plain=outer.compress == "none",
            )
