"""Whole steps of one rank: run a table, put together what all ranks know, finish gradients."""

from dataclasses import dataclass, replace

import torch

from gpipe_hpc.comm.group import Group
from gpipe_hpc.comm.mesh import Mesh
from gpipe_hpc.comm.nests import Nest
from gpipe_hpc.comm.world import World
from gpipe_hpc.engine.batch.cutting import join
from gpipe_hpc.engine.batch.outputs import broadcast_nest
from gpipe_hpc.engine.executor import Executor, Outcome
from gpipe_hpc.engine.outer.compress.compression import Compression
from gpipe_hpc.engine.outer.settings import Outer
from gpipe_hpc.engine.outer.ways import Way, choose_way
from gpipe_hpc.engine.recorder import Recorder
from gpipe_hpc.engine.run import Run
from gpipe_hpc.engine.stages.stage import Stage, training_modes
from gpipe_hpc.engine.stages.tables import Tables
from gpipe_hpc.engine.stages.wiring import Wiring
from gpipe_hpc.engine.state.drift import Drift
from gpipe_hpc.engine.sums.gradients import unite_flags
from gpipe_hpc.engine.sums.loss import backward_seed, final_divisor
from gpipe_hpc.engine.sums.loss_scale import LossScale, any_overflow
from gpipe_hpc.engine.sums.results import Exchange, StepLoss, StepResult
from gpipe_hpc.engine.sums.squares import GradientParts
from gpipe_hpc.engine.sums.tied import TiedParameter
from gpipe_hpc.errors import DataError


@dataclass(frozen=True)
class Site:
    """Where a rank stands: its world, and the groups of all ranks and of its pipeline."""

    world: World
    mesh: Mesh
    everybody: Group
    pipeline: Group

    @classmethod
    def of(cls, world: World, mesh: Mesh) -> "Site":
        """Form the groups; the same call on every rank.

        One pipeline of all ranks needs one group: each is a thread that wakes up 100 times a
        second (Gloo), or buffers of its own (NCCL). The world's own group is not used: boundaries
        travel on its connections, which the sums of a step would have to share.
        """
        everybody = world.group([tuple(range(world.size))])
        if mesh.replicas == 1:
            return cls(world, mesh, everybody, everybody)
        pipelines = [mesh.pipeline_ranks(r) for r in range(mesh.replicas)]
        return cls(world, mesh, everybody, world.group(pipelines))

    @property
    def replica(self) -> int:
        """Return which replica the rank belongs to."""
        return self.mesh.replica_of(self.world.rank)

    @property
    def stage_rank(self) -> int:
        """Return the rank's position in its pipeline."""
        return self.mesh.stage_rank_of(self.world.rank)


class Steps:
    """Train, evaluate and predict with the stages of one rank."""

    def __init__(
        self,
        site: Site,
        tables: Tables,
        stages: dict[int, Stage],
        wiring: Wiring,
        tied: list[TiedParameter],
        loss_scale: LossScale | None = None,
        buffers: str = "average",
        part_of: tuple[int, ...] = (),
        outer: Outer | None = None,
        seed: int = 0,
    ) -> None:
        outer = outer or Outer()
        self.compression = Compression(outer, seed, may_skip=loss_scale is not None)
        self.loss_scale = loss_scale
        self._part_of = part_of
        self._site = site
        self._placement = tables.training.placement
        self._stages = stages
        self._wiring = wiring
        self._tied = tied
        self._trainer, self._evaluator = (
            Executor(table, site.stage_rank, stages, wiring, site.world, overlaps=outer.overlap)
            for table in (tables.training, tables.evaluation)
        )
        for index, stage in stages.items():
            copies = wiring.reductions[index]
            way = self._way(outer, stage, copies) if copies.size > 1 else None
            stage.gradients.sum_over(way, tables.buckets[index] if tables.buckets else ())
        self._drifts = {
            index: Drift(stage.layers, wiring.reductions[index], site.world.rank, buffers)
            for index, stage in stages.items()
        }
        num_global = self._placement.num_microbatches * site.mesh.replicas
        self._exchange = Exchange(num_global, site.everybody, site.world.device)
        # The loss weight of the last step; backward is seeded near its inverse.
        self.weight = torch.tensor(float(num_global), dtype=torch.float64, device=site.world.device)

    def _way(self, outer: Outer, stage: Stage, copies: Group) -> Way:
        if outer.compress != "none":
            return self.compression.way(stage, copies)
        return choose_way(outer, copies)

    @property
    def recorder(self) -> Recorder:
        """Return what was recorded of the last training step."""
        return self._trainer.recorder

    def train(self, run: Run) -> StepResult:
        """Run forward, backward and reduction; replace the gradients of all parameters."""
        self._refuse_empty(run)
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        seed = backward_seed(self.weight) * scale
        for stage in self._stages.values():
            stage.gradients.clear()
            stage.statistics.clear()
            if stage.squares is not None:
                stage.squares.begin()
        for tied in self._tied:
            tied.clear()
        self._begin()
        self.compression.begin(run.step, seed)
        outcome = self._trainer.run(replace(run, seed=seed))
        loss = self._loss_of(outcome, self._squares() if self._part_of else None)
        for tied in self._tied:
            tied.start_reduction()
        divisor = final_divisor(loss.weight, seed)
        flags: dict[int, list[bool]] = {}
        for stage in self._stages.values():
            copies = self._wiring.reductions[stage.index]
            used, drifted = stage.gradients.used_flags(), self._drifts[stage.index].flags()
            united = unite_flags([*used, *drifted], copies)
            stage.gradients.finish(divisor, united[: len(used)])
            flags[stage.index] = united[len(used) :]
        for tied in self._tied:
            tied.finish(divisor)
        self.weight = loss.weight
        is_skipped = self.loss_scale is not None and self._drop_overflow(self.loss_scale)
        for stage in self._stages.values():
            stage.statistics.finish(is_kept=not is_skipped)
            self._drifts[stage.index].settle(flags[stage.index])
        self.compression.settle(is_kept=not is_skipped)
        return StepResult(loss, is_skipped, scale, self._parts(loss, divisor))

    def _squares(self) -> dict[int, torch.Tensor]:
        """Return the squares of this rank's parts of the gradients, by global micro-batch."""
        first = self._site.replica * self._placement.num_microbatches
        found: dict[int, torch.Tensor] = {}
        for stage in self._stages.values():
            for own, square in ({} if stage.squares is None else stage.squares.take()).items():
                known = found.get(first + own)
                found[first + own] = square if known is None else known + square
        return found

    def _parts(self, loss: StepLoss, divisor: torch.Tensor) -> GradientParts | None:
        if loss.squares is None:
            return None
        return GradientParts(loss.squares / divisor.square(), loss.terms[1], self._part_of)

    def _drop_overflow(self, scale: LossScale) -> bool:
        """Set all gradients to None, on every rank, if one of any rank is not finite."""
        site = self._site
        parameters = [p for s in self._stages.values() for p in s.named_parameters().values()]
        present = [p.grad for p in parameters if p.grad is not None]
        overflowed = any_overflow(present, site.everybody, site.world.device)
        if overflowed:
            for parameter in parameters:
                parameter.grad = None
        scale.update(overflowed=overflowed)
        return overflowed

    def evaluate(self, run: Run) -> StepResult:
        """Return the loss of a global batch, in evaluation mode."""
        self._begin()
        with training_modes(self._stages.values(), False):
            outcome = self._evaluator.run(run)
        return StepResult(self._loss_of(outcome))

    def predict(self, run: Run) -> Nest:
        """Return the outputs of this replica's micro-batches put together, on each of its ranks."""
        site = self._site
        self._begin()
        with training_modes(self._stages.values(), False):
            outcome = self._evaluator.run(run)
        self._end(outcome)
        everywhere: dict[int, Nest] = {}
        for holder in self._placement.holders(self._placement.num_stages - 1):
            root = site.mesh.world_rank(site.replica, holder)
            everywhere |= broadcast_nest(outcome.outputs, site.pipeline, root, site.world)
        return join([everywhere[m] for m in sorted(everywhere)])

    def _refuse_empty(self, run: Run) -> None:
        """Raise DataError where replicas would wait in vain to normalise a micro-batch."""
        if self._wiring.peers is None or run.inputs is None or all(run.inputs.sizes):
            return
        raise DataError(
            f"replica {self._site.replica}: expected samples in every micro-batch, as BatchNorm "
            f"normalises each over all replicas, got none in micro-batch "
            f"{run.inputs.sizes.index(0)}; use larger batches, fewer micro-batches, or "
            f"normalise_over_replicas=False"
        )

    def _begin(self) -> None:
        """Begin a run: note what buffers are like."""
        for drift in self._drifts.values():
            drift.begin()

    def _end(self, outcome: Outcome) -> None:
        """End it: note which of them it has changed."""
        for index, drift in self._drifts.items():
            drift.end(outcome.samples.get(index, 0))

    def _loss_of(
        self, outcome: Outcome, squares: dict[int, torch.Tensor] | None = None
    ) -> StepLoss:
        """End a run and return its loss, which all ranks know.

        All ranks wait here for all others: none goes on behind a step that failed on one.
        """
        self._end(outcome)
        first = self._site.replica * self._placement.num_microbatches
        return self._exchange(
            {first + m: term for m, term in outcome.losses.items()},
            {first + m: noted for m, noted in outcome.noted.items()},
            squares,
        )
