"""Whole steps of one rank: run the table, reduce results over all ranks, divide gradients."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch

from gpipe_hpc.batches import Output, join, square_output
from gpipe_hpc.comm.collectives.group import CollectiveHandle, ControlGroup, Group
from gpipe_hpc.comm.transport.wire import NestStructure, as_bytes, assemble, disassemble, packed
from gpipe_hpc.comm.world.groups import RankContext
from gpipe_hpc.comm.world.world import World
from gpipe_hpc.data_parallel import (
    BucketItem,
    Compression,
    Divisor,
    OwnedParameter,
    ReduceStrategy,
    choose_sharding,
    choose_strategy,
)
from gpipe_hpc.device.deferred import AsyncHostTensor
from gpipe_hpc.engine.assembly import TiedParameter
from gpipe_hpc.engine.buffer_sync import BufferSynchronizer
from gpipe_hpc.engine.executor import Executor
from gpipe_hpc.engine.gradient_norms import GradientParts
from gpipe_hpc.engine.local_sgd import LocalSgd
from gpipe_hpc.engine.loss import backward_seed, final_divisor, refuse_negative_weight
from gpipe_hpc.engine.outsiders import ForeignParameters
from gpipe_hpc.engine.parameters import (
    TrainableParameters,
    refuse_different,
    refuse_nothing_trained,
    warn_cut_off,
    warn_nothing_trained,
)
from gpipe_hpc.engine.precision import LossScale, count_overflows
from gpipe_hpc.engine.recorder import Recorder
from gpipe_hpc.engine.run import Outcome, Run
from gpipe_hpc.engine.same_data import SameData
from gpipe_hpc.engine.stage import Stage, evaluation_mode
from gpipe_hpc.engine.step_reduction import StepFlags, StepReduction, StepTotals
from gpipe_hpc.engine.step_result import StepLoss, StepResult, share_places
from gpipe_hpc.engine.wiring import Tables, Wiring
from gpipe_hpc.errors import DataError
from gpipe_hpc.pytree import Nest
from gpipe_hpc.settings import MicrobatchSplit, Outer

log = logging.getLogger("gpipe_hpc.pipeline")


class Steps:
    """Trains, evaluates and predicts with the stages of one rank.

    Args:
        context: The rank's position and groups.
        tables: The tables of steps and evaluations.
        portions: The micro-batches of all replicas.
        stages: The stages of this rank by index.
        wiring: Channels and groups of copies.
        tied: The tied parameters that this rank holds.
        names: All parameters of the model, the same on every rank.
        loss_scale: The loss scale of float16; None for other precisions.
        buffers: How replicas combine buffers; the setting ``pipeline.buffers``.
        part_of: For each micro-batch the first micro-batch of its part, if squared norms of
            gradients of parts are measured; else empty.
        outer: The settings of data parallelism.
        seed: The seed of the run.
        outsiders: The parameters that backwards of this rank must not reach.
    """

    def __init__(
        self,
        context: RankContext,
        tables: Tables,
        portions: MicrobatchSplit,
        stages: dict[int, Stage],
        wiring: Wiring,
        tied: list[TiedParameter],
        names: Sequence[str],
        loss_scale: LossScale | None,
        buffers: str,
        part_of: tuple[int, ...],
        outer: Outer,
        seed: int,
        outsiders: ForeignParameters,
    ) -> None:
        uses_local_sgd = tables.averaging is not None
        self.compression = Compression(
            outer, seed, may_skip=loss_scale is not None and not uses_local_sgd
        )
        self._sent_bytes = [0]  # by reductions without compression
        self.loss_scale = loss_scale
        self._part_of = part_of
        self._context = context
        self._placement = tables.training.placement
        self._stages = stages
        self._wiring = wiring
        self._tied = tied
        self._trainer, self._evaluator = (
            Executor(
                table,
                context.stage_rank,
                stages,
                wiring,
                context.world,
                overlaps=outer.overlap,
                outsiders=outsiders,
            )
            for table in (tables.training, tables.evaluation)
        )
        self._gradients = [
            *(stage.gradients for _, stage in sorted(stages.items())),
            *(tie.gradients for tie in tied),
        ]
        self._choose_strategies(outer, tables)
        self.sharding = choose_sharding(
            outer,
            {index: stage.gradients for index, stage in stages.items()},
            wiring.reductions,
            tables.buckets,
        )
        self._buffer_syncs = self._synchronizers(buffers)
        self._has_warned_of_outputs = False
        self.same_data = SameData(self._placement, context.stage_rank)
        self._watch_copied_parameters()
        self._portions = portions
        self._first = portions.of(context.replica).start
        num_global = portions.total
        widths = {index: sync.num_flags for index, sync in self._buffer_syncs.items()}
        self._flags = StepFlags.gathered(names, widths, context.world_group)
        self._reduction = StepReduction(
            num_global,
            self._flags.size,
            context.world_group,
            context.world.rank,
            context.world.device,
            context.pipeline if uses_local_sgd else None,
        )
        held = {n: p for stage in stages.values() for n, p in stage.named_parameters().items()}
        self._trained = TrainableParameters(held, names, context.world_group)
        self._num_parameters, self._has_trained = len(names), False
        self._has_warned = False  # that all is frozen
        self._idle: StepLoss | None = None  # of the last step, if no step has trained anything
        self._owned: dict[str, OwnedParameter] | None = None
        self._was_sharded = False  # when these were found
        self._unjudged: StepLoss | None = None  # of the last step, on a device
        self.local_sgd: LocalSgd | None = None
        self._shares: torch.Tensor | None = None
        if uses_local_sgd:
            self._shares = context.world.device.to_device(share_places(portions.counts))
            self.local_sgd = self._make_local_sgd(outer, tables, buffers)
        # The loss weight of the last step; backward is seeded near its inverse.
        on = context.world.device.torch
        self.weight = torch.tensor(float(num_global), dtype=torch.float64, device=on)

    def _synchronizers(self, buffers: str) -> dict[int, BufferSynchronizer]:
        """Return the synchronizer of each stage's buffers."""
        copies, rank = self._wiring.reductions, self._context.world.rank
        return {
            index: BufferSynchronizer(stage.layers, copies[index], rank, buffers, stage.device)
            for index, stage in self._stages.items()
        }

    def _make_local_sgd(self, outer: Outer, tables: Tables, buffers: str) -> LocalSgd:
        return LocalSgd(
            outer,
            self._context.world.rank,
            self._context.mesh,
            tables,
            self._stages,
            self._wiring,
            self._tied,
            self.compression,
            buffers,
        )

    def _watch_copied_parameters(self) -> None:
        """Watch parameters with copies on several ranks: forwards must write the same into all."""
        tied = [tie.name for tie in self._tied if tie.group.size > 1]
        for index, stage in self._stages.items():
            is_alone = self._wiring.reductions[index].size == 1
            stage.parameters.watch_copied(tied if is_alone else stage.named_parameters())

    def _choose_strategies(self, outer: Outer, tables: Tables) -> None:
        """Choose how the gradients of each stage are summed over its copies."""
        uses_local_sgd = tables.averaging is not None
        strategies: dict[Group, ReduceStrategy | None] = {}
        # In the same order on all ranks that share stages.
        for index, stage in sorted(self._stages.items()):
            copies = self._wiring.reductions[index]
            if copies not in strategies:
                strategies[copies] = choose_strategy(outer, copies)
            strategy = strategies[copies]
            if strategy is not None and outer.compress != "none" and not uses_local_sgd:
                strategy = self.compression.reduction(index, stage.gradients, copies).start
            elif strategy is not None:
                strategy = self._counted(strategy, copies.size)
            is_bucketed = strategy is not None and bool(tables.buckets)
            stage.gradients.reduce_by(strategy, tables.buckets[index] if is_bucketed else ())

    def _counted(self, strategy: ReduceStrategy, size: int) -> ReduceStrategy:
        """Return a strategy that counts sent bytes as for a ring all-reduce on any backend.

        If the optimizer is sharded, half of it is sent later, by gathering the parameters.
        """

        sent_bytes = self._sent_bytes  # not self: a cycle would outlive the pipeline

        def start(flat: torch.Tensor, items: Sequence[BucketItem]) -> CollectiveHandle:
            sent_bytes[0] += 2 * (size - 1) * flat.nbytes // size
            return strategy(flat, items)

        return start

    def sharers(self, stage: int) -> Group:
        """Return the ranks that combine gradients of one of this rank's stages."""
        return self._wiring.reductions[stage]

    @property
    def recorder(self) -> Recorder:
        """Return the recorder of the last training step."""
        return self._trainer.recorder

    def train(self, run: Run, tell: Callable[[], Sequence[float]] | None = None) -> StepResult:
        """Run forward, backward and reduction; replace the gradients of all parameters.

        `tell` returns the numbers that this rank reports to all ranks; called after its actions.
        """
        self._refuse_empty(run)
        if self._unjudged is not None and self._unjudged.fetched.poll() is not None:
            refuse_negative_weight(self._unjudged.known_weight)
        for stage in self._stages.values():
            stage.refuse_other_parameters()
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        is_on_host = not self._context.world.device.is_accelerator
        seed = backward_seed(self.weight, is_on_host=is_on_host) * scale
        if not self._trained.is_agreed:
            self._trained.agree()
            self._rebuild_buckets()
        for gradients in self._gradients:
            gradients.clear()
        for stage in self._stages.values():
            stage.statistics.clear()
            if stage.squares is not None:
                stage.squares.begin()
        self._begin()
        if self.local_sgd is None:
            self.compression.begin(run.step, seed)
        outcome = self._trainer.run(replace(run, seed=seed))
        for stage in self._stages.values():
            stage.refuse_changes()
        self._collect_late()
        squares = self._squares() if self._part_of else None
        for tie in self._tied:
            for number in range(tie.gradients.num_buckets):
                tie.gradients.start_reduction(number)
        known = self._end(outcome, self._own_flags, tell, self._overflows, squares, run.digests)
        self.same_data.note(run.step, known.digests)
        if StepFlags.HAS_WRITTEN in known.flags:
            self._compare_copies()
        has_changed = StepFlags.HAS_CHANGED in known.flags
        if has_changed:
            known = known._replace(overflows=self._sum_late(known.overflows))
        if not self._has_trained:
            self._look_whether_trained(known)
        loss = known.loss
        self.weight = weight = loss.weight
        if self.local_sgd is not None:  # each replica divides by the weight of its own share
            weight = loss.weight_of(self._portions.of(self._context.replica))
        if is_on_host:
            refuse_negative_weight(float(weight))
        else:  # in the next step, when it has been copied to the host
            self._unjudged = loss
        divisor = final_divisor(weight, seed)
        # The one place in a step where the host waits for the device.
        is_skipped = self.loss_scale is not None and bool(known.overflows.read() > 0)
        if self.loss_scale is not None:
            self.loss_scale.update(overflowed=is_skipped)
        if is_skipped:
            self._drop_gradients()
        else:
            self._finish_gradients(divisor, known.flags)
        for index, stage in self._stages.items():
            stage.statistics.finish(is_kept=not is_skipped)
            self._buffer_syncs[index].settle(self._flags.buffers(index, known.flags))
        if self.local_sgd is None:
            self.compression.end(is_kept=not is_skipped)
        else:
            assert self._shares is not None, "local SGD weighs the shares of replicas"
            self.local_sgd.end(outcome.samples)
            self.local_sgd.note(loss.weights_of(self._shares))
        if has_changed:
            self._rebuild_buckets()
        parts = self._parts(loss, divisor)
        if self.same_data.is_waiting:
            loss = replace(loss, on_read=self.same_data.judge)
        return StepResult(loss, is_skipped, scale, parts, known.reported, known.synced_at_s)

    def _compare_copies(self) -> None:
        """Raise ModelError if copies of a parameter differ after this step; waits for all ranks."""
        context, stages = self._context, [stage.parameters for stage in self._stages.values()]
        together = context.world_group if self.local_sgd is None else context.pipeline
        refuse_different(stages, together, context.world_group)

    def _look_whether_trained(self, known: StepTotals) -> None:
        """Raise ModelError if nothing was trained; warn if no parameter of the first layers was.

        A batch whose loss is 0 may have nothing to learn from, so the next one is checked too. The
        loss of an accelerator is read in the next step, as the host would wait for it now.
        """
        self._has_trained = self._flags.is_any_used(known.flags) or not self._num_parameters
        if self._has_trained:
            if self._context.world.rank == 0:
                names = self._trained.names
                warn_cut_off(names, self._flags.used(names, known.flags))
            return
        names, own = self._trained.names, self._portions.of(self._context.replica)
        if not names:
            if self._context.world.rank == 0 and not self._has_warned:
                warn_nothing_trained(self._num_parameters)
            self._has_warned = True
            return
        looked_at = self._idle if self._context.world.device.is_accelerator else known.loss
        self._idle = known.loss
        every = range(self._portions.total) if self.local_sgd is None else own
        if looked_at is not None and not looked_at.is_zero(every):
            refuse_nothing_trained(len(names))

    def _squares(self) -> dict[int, torch.Tensor]:
        """Return squared norms of this rank's parts of the gradients, by global micro-batch."""
        first = self._first
        found: dict[int, torch.Tensor] = {}
        for stage in self._stages.values():
            for own, square in ({} if stage.squares is None else stage.squares.take()).items():
                known = found.get(first + own)
                found[first + own] = square if known is None else known + square
        return found

    def _parts(self, loss: StepLoss, divisor: torch.Tensor) -> GradientParts | None:
        if loss.squares is None:
            return None
        squares = loss.squares / divisor.square()
        return GradientParts.of(squares, loss.terms[1], self._part_of, self._context.world.device)

    def _own_flags(self) -> set[int]:
        """Return the flags that this rank sets: of parameters that it used, and of its buffers."""
        flags: set[int] = set()
        for gradients in self._gradients:
            flags |= self._flags.of_use(gradients.trained_names(), gradients.used_flags())
        for index, stage in self._stages.items():
            flags |= self._flags.of_buffers(index, self._buffer_syncs[index].flags())
            if stage.parameters.written:
                flags.add(StepFlags.HAS_WRITTEN)
        if self._trained.has_changed:
            flags.add(StepFlags.HAS_CHANGED)
        return flags

    def _rebuild_buckets(self) -> None:
        for gradients in self._gradients:
            gradients.rebuild()

    def _collect_late(self) -> None:
        """Collect gradients of unfrozen parameters, which are reduced after all ranks agree."""
        for stage in self._stages.values():
            late = stage.gradients.collect_late()
            if late and stage.squares is not None:
                stage.squares.before_reduction(late)
        for tie in self._tied:
            tie.gradients.collect_late()

    def _sum_late(self, overflows: AsyncHostTensor) -> AsyncHostTensor:
        """Agree on the trained parameters and start their late reductions, on all ranks.

        Return the number of overflowed gradients; `overflows` is the number without the late ones.
        """
        self._trained.agree()
        for gradients in self._gradients:
            gradients.start_late()
        found = self._overflows()
        if found is None:
            return overflows
        self._context.world_group.all_reduce(found)
        return AsyncHostTensor.of(found, self._context.world.device)

    def _overflows(self) -> torch.Tensor | None:
        """Return the number of reduced gradients that are not finite; None without a loss scale.

        Waits for the reductions, as all ranks skip the step, or none.
        """
        if self.loss_scale is None:
            return None
        for each in self._gradients:
            each.wait()
        gradients = [owned.parameter.grad for owned in self.owned_gradients().values()]
        present = [gradient for gradient in gradients if gradient is not None]
        return count_overflows(present, self._context.world.device)

    def _drop_gradients(self) -> None:
        for stage in self._stages.values():
            for parameter in stage.named_parameters().values():
                parameter.grad = None
            if stage.gradients.shards is not None:
                stage.gradients.shards.drop()

    def _finish_gradients(self, number: torch.Tensor, used: Collection[int]) -> None:
        """Divide all gradients; set those of parameters that no rank has used to None."""
        divisor = Divisor(number, self._context.world.device)
        for gradients in self._gradients:
            names = gradients.trained_names()
            gradients.finish(divisor, self._flags.used(names, used))

    def owned_parameters(self) -> dict[str, OwnedParameter]:
        """Return the parameters, or shards of them, that this rank updates, by global name."""
        not_owned = frozenset() if self.sharding is None else self.sharding.not_owned
        return {n: owned for n, owned in self.owned_gradients().items() if n not in not_owned}

    def owned_gradients(self) -> dict[str, OwnedParameter]:
        """Return the parameters, or their shards, whose gradients this rank has, by global name."""
        stages = self._stages.values()
        is_sharded = any(stage.gradients.shards is not None for stage in stages)
        if self._owned is None or is_sharded != self._was_sharded:
            self._owned = {n: p for stage in stages for n, p in stage.owned_parameters().items()}
            self._was_sharded = is_sharded
        return dict(self._owned)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the full gradients of this rank's parameters, by name; a collective call."""
        found: dict[str, torch.Tensor | None] = {}
        for _, stage in sorted(self._stages.items()):
            found |= {name: p.grad for name, p in stage.named_parameters().items()}
            if stage.gradients.shards is not None:
                found |= stage.gradients.shards.gather_gradients()
        return found

    def outer_state(self) -> dict[str, torch.Tensor]:
        """Return the state of compression and local SGD for a checkpoint."""
        local_sgd = {} if self.local_sgd is None else self.local_sgd.state()
        return {**self.compression.state(), **local_sgd}

    def outer_wanted(self, stored: Collection[str]) -> list[str]:
        """Return which tensors of a checkpoint `restore_outer` needs."""
        local_sgd = [] if self.local_sgd is None else self.local_sgd.wanted(stored)
        return [*self.compression.wanted(stored), *local_sgd]

    def restore_outer(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the state of `outer_state` from a checkpoint, after the parameters."""
        self.compression.restore(tensors)
        if self.local_sgd is not None:
            self.local_sgd.restore(tensors)

    @property
    def outer_sent_bytes(self) -> int:
        """Return the number of bytes that this rank has sent to combine copies of stages."""
        local_sgd = 0 if self.local_sgd is None else self.local_sgd.sent_bytes
        return self._sent_bytes[0] + self.compression.sent_bytes + local_sgd

    def evaluate(self, run: Run) -> StepResult:
        """Return the loss of a global batch, in evaluation mode."""
        return StepResult(self._end(self._evaluate(run)).loss)

    def predict(self, run: Run, where: str) -> Nest:
        """Return the joined outputs of this replica's micro-batches, on each of its ranks.

        `where` names the last layer.
        """
        context, outcome = self._context, self._evaluate(run)
        self._note(outcome)
        everywhere: dict[int, Output] = {}
        for holder in self._placement.holders(self._placement.num_stages - 1):
            root = context.mesh.world_rank(context.replica, holder)
            everywhere |= broadcast_nest(outcome.outputs, context.pipeline, root, context.world)
        joined = join(everywhere, where)
        last = self._stages.get(self._placement.num_stages - 1)
        if last is not None and context.replica == 0 and not self._has_warned_of_outputs:
            inputs = run.inputs.nests[0] if run.inputs else None
            layers = list(last.layers.values())
            self._warn_of_square(square_output(everywhere, layers, inputs), where)
        return joined

    def _warn_of_square(self, shape: Sequence[int] | None, where: str) -> None:
        """Warn once about a square output, whose rows may not be samples."""
        if shape is None:
            return
        self._has_warned_of_outputs = True
        log.warning(
            "%s: outputs have shape %s for micro-batches of %d samples and are joined along the "
            "first dimension. If the second dimension counts samples, too (x @ x.T), the result is "
            "not that of the whole batch: predict with microbatches=1. Otherwise it is correct",
            where,
            shape,
            shape[0],
        )

    def _evaluate(self, run: Run) -> Outcome:
        """Run the table of evaluations, in evaluation mode."""
        self._begin()
        with evaluation_mode(self._stages.values()):
            outcome = self._evaluator.run(run)
            for stage in self._stages.values():
                stage.parameters.end(trains=False)
        if self.local_sgd is not None:
            self.local_sgd.end(outcome.samples)
        return outcome

    def _refuse_empty(self, run: Run) -> None:
        """Raise DataError for empty micro-batches if BatchNorm normalises over replicas."""
        if self._wiring.peers is None or run.inputs is None or all(run.inputs.sizes):
            return
        raise DataError(
            f"replica {self._context.replica}: micro-batch {run.inputs.sizes.index(0)} has no "
            f"samples, but normalise_over_replicas=True needs samples of every replica in each "
            f"micro-batch; use larger batches, fewer micro-batches, or "
            f"normalise_over_replicas=False"
        )

    def log_pending(self) -> None:
        """Log pending warnings of the steps so far; waits for the device."""
        for sync in self._buffer_syncs.values():
            sync.log_pending()
        if self.local_sgd is not None:
            self.local_sgd.report_buffers()

    def _begin(self) -> None:
        """Begin a run of a table: note versions of parameters and buffers."""
        may_arrive = self.sharding is not None and self.sharding.is_gathering
        for stage in self._stages.values():
            stage.parameters.begin(may_arrive=may_arrive)
        for sync in self._buffer_syncs.values():
            sync.begin()
        if self.local_sgd is not None:
            self.local_sgd.begin()

    def _note(self, outcome: Outcome) -> None:
        """Note which buffers a run of a table has changed."""
        for index, sync in self._buffer_syncs.items():
            sync.end(outcome.samples.get(index, 0))

    def _end(
        self,
        outcome: Outcome,
        flags: Callable[[], Collection[int]] = frozenset,
        tell: Callable[[], Sequence[float]] | None = None,
        overflows: Callable[[], torch.Tensor | None] = lambda: None,
        squares: Mapping[int, torch.Tensor] | None = None,
        digests: Sequence[torch.Tensor | float] = (),
    ) -> StepTotals:
        """End a run of a table; return its loss and the other totals over all ranks.

        All ranks wait here for all others, so none continues after a step that failed on one.
        """
        self._note(outcome)
        first = self._first
        losses = {first + m: term for m, term in outcome.losses.items()}
        noted = {first + m: noted for m, noted in outcome.noted.items()}
        own = {*flags(), *(StepFlags.IS_SUM for term in losses.values() if term.is_sum)}
        return self._reduction.reduce(
            losses,
            noted,
            own,
            overflows=overflows(),
            reported=() if tell is None else tell(),
            squares=squares,
            digests=digests,
        )


def broadcast_nest(nest: Nest, group: ControlGroup, root: int, world: World) -> Nest:
    """Return the nest of world rank `root` on every rank of the group, without gradients."""
    structure, tensors = disassemble(nest, world.device)
    structure = NestStructure.from_bytes(group.broadcast_object(structure.to_bytes(), root))
    if world.rank != root:
        tensors = [meta.allocate(world.device) for meta in structure.metas]
    tensors = [packed(*each) for each in zip(tensors, structure.metas, strict=True)]
    for tensor in tensors:
        if tensor.numel():
            group.broadcast(as_bytes(tensor), root)
    return assemble(structure, tensors)
