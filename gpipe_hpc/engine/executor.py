"""Run one rank's list of actions: the pipeline algorithm on one page.

    rank 1 of 3, 1F1B, 4 micro-batches:   F0 F1 B0 F2 B1 F3 B2 B3

A forward takes the output of the previous stage, runs this stage's layers, and passes the result
on. A backward takes the gradient of that output and passes the gradient of its input back. The
state of a micro-batch between its forward and its backward is in `StageRunner.saved`. Transfers and
reductions are actions of the list too, so it is checked for deadlocks before anything runs.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Final

import torch

from gpipe_hpc.comm.transport.base import Message, PlacedChannel
from gpipe_hpc.comm.transport.wire import as_received
from gpipe_hpc.comm.world.world import World
from gpipe_hpc.data_parallel import GradientReducer
from gpipe_hpc.device.memory_snapshot import MemorySnapshot, OutOfMemoryError
from gpipe_hpc.engine.inputs import Intake
from gpipe_hpc.engine.layer_runner import RunMode
from gpipe_hpc.engine.offload import PinnedBufferPool
from gpipe_hpc.engine.outsiders import ForeignParameters
from gpipe_hpc.engine.precision import keeping_casts
from gpipe_hpc.engine.recorder import ActionSpan, Recorder
from gpipe_hpc.engine.run import Outcome, Run
from gpipe_hpc.engine.stage import Stage
from gpipe_hpc.engine.stage_runner import ForwardPlan, StageRunner
from gpipe_hpc.engine.wiring import BATCH, Wiring
from gpipe_hpc.errors import ActionError
from gpipe_hpc.models.remedies import remedy_of
from gpipe_hpc.schedule import Action, Channel, Op, Schedule, channel_of
from gpipe_hpc.schedule.table.lifetimes import ENDS_BACKWARD

Hop = tuple[int, int, int]
"""The source stage and the destination stage of a message, and its micro-batch."""

_NOTHING: Final = nullcontext()


class Executor:
    """Runs the actions of one rank, in their order, on its stages.

    After a run no state of micro-batches is left. Errors name rank, stage, micro-batch and action.

    Args:
        schedule: The lowered table.
        rank: This rank's position in the pipeline.
        stages: The stages of this rank by index.
        wiring: Channels and groups.
        world: The ranks of the run.
        overlaps: Whether buckets of gradients may be reduced during a stage's last backward, and
            each layer waits for its own gathered parameters.
        outsiders: The parameters that backwards must not reach.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, Stage],
        wiring: Wiring,
        world: World,
        *,
        overlaps: bool,
        outsiders: ForeignParameters,
    ) -> None:
        self._schedule, self._stages, self._wiring, self._world = schedule, stages, wiring, world
        self._transport, self._overlaps = wiring.transport, overlaps
        self._precision = next((stage.precision for stage in stages.values()), "float32")
        self.recorder = Recorder(world.device)
        # Outputs and gradients that the next stage or a SEND has not used yet.
        self._made: dict[Hop, Message] = {}
        self._actions = schedule.ranks[rank]
        self._all = frozenset(self._actions)
        self._intake = Intake(world.device)
        self._offloading = {a.stage for a in self._actions if a.op is Op.OFFLOAD}
        self._pinned = PinnedBufferPool(world.device) if self._offloading else None
        sending = {a.stage for a in self._actions if a.op is Op.SEND_F}
        self._runners = {
            i: StageRunner(
                stage,
                wiring.peers,
                self._intake,
                self._pinned,
                sends=i in sending,
                outsiders=outsiders,
            )
            for i, stage in stages.items()
        }
        self._reducer = GradientReducer(
            [(a.stage, a.bucket) for a in self._actions if a.op is Op.REDUCE_GRAD],
            {index: stage.gradients for index, stage in stages.items()},
            self._start_reduction,
        )
        self._last_backwards = {a.stage: a for a in self._actions if a.op in ENDS_BACKWARD}
        # Both I and W of a stage's last micro-batch compute gradients of the last backward.
        self._ends = {
            a
            for a in self._actions
            if a.op in (Op.B, Op.I, Op.W)
            and overlaps
            and wiring.reductions[a.stage].size > 1
            and a.microbatch == self._last_backwards[a.stage].microbatch
        }
        # After a stage's last forward of a step, statistics of BatchNorm layers are summed.
        forwards = {a.stage: a for a in self._actions if a.op is Op.F}
        self._measured = {a for a in forwards.values() if len(stages[a.stage].statistics)}
        handlers: dict[Op, Callable[[Action, Run], None]] = {
            Op.F: self._forward,
            Op.R: self._recompute,
            Op.B: self._backward,
            Op.I: self._backward,
            Op.W: self._weight_gradients,
            Op.SEND_F: self._send,
            Op.SEND_B: self._send,
            Op.RECV_F: self._post_receive,
            Op.RECV_B: self._post_receive,
            Op.REDUCE_GRAD: lambda action, run: self._reducer.reach(action.stage, action.bucket),
            Op.UNSHARD: self._gather,
            Op.OFFLOAD: lambda action, run: self._runners[action.stage].offload(_number(action)),
            Op.FETCH: lambda action, run: self._runners[action.stage].fetch(_number(action)),
        }
        # Looked up once, so that a step is a plain loop over calls.
        self._program = [(action, partial(handlers[action.op], action)) for action in self._actions]
        self._plans = {a: self._plan(a) for a in self._actions if a.op is Op.F}
        placement, transfers = schedule.placement, (Op.SEND_F, Op.SEND_B, Op.RECV_F, Op.RECV_B)
        self._channels = {
            a: wiring.channels[channel_of(a, placement)] for a in self._actions if a.op in transfers
        }
        self._incoming = self._incoming_channels()
        self._outcome = Outcome()

    def run(self, run: Run) -> Outcome:
        """Run all actions in order. The states of torch's random generators are restored.

        Raises ActionError if an action failed, OutOfMemoryError if it failed for lack of memory,
        and ConnectionError or TimeoutError if a wait for another rank failed.
        """
        outcome = self._outcome = Outcome()
        self.recorder.start_step()
        for runner in self._runners.values():
            runner.begin()
        self._reducer.begin()
        self._note_gathering()
        index = 0
        try:
            # Under the caller's inference mode, writes in place could not be seen.
            with torch.inference_mode(False), keeping_casts(self._precision, self._world.device):
                for action, call in self._program:
                    self._world.activity = action  # named if it stalls
                    call(run)
                    index += 1
            if self._pinned is not None:
                self._pinned.end()
            self._world.activity = "waiting until all it sent has left"
            self._transport.finish()
            for runner in self._runners.values() if self._last_backwards else ():
                runner.refuse_draws()
        except (ConnectionError, TimeoutError) as error:
            raise type(error)(f"{self._position(index)}: {error}") from error
        except Exception as error:
            if self._world.device.out_of_memory(error):
                raise self._exhausted(index, error) from error
            what = ": ".join([*getattr(error, "__notes__", ())[:1], type(error).__name__])
            remedy = remedy_of(error)
            shown = str(error) if remedy is None else f"{error}; {remedy}"
            raise ActionError(f"{self._position(index)}: {what}: {shown}") from error
        finally:
            # A step that failed keeps no memory, and no state that the next step would use.
            num_left = len(self._made) + sum(runner.num_kept for runner in self._runners.values())
            self._made.clear()
            self._outcome = Outcome()
            if self._pinned is not None and index < len(self._program):
                with suppress(
                    RuntimeError
                ):  # of a broken device, whose first error is raised above
                    self._pinned.end()
            for runner in self._runners.values():
                runner.end()
        self._world.activity = "ending"
        assert num_left == 0, f"rank {self._world.rank}: {num_left} stored values never used"
        return outcome

    def _forward(self, action: Action, run: Run) -> None:
        stage, microbatch = action.stage, action.microbatch
        assert microbatch is not None, "checked with the table"
        runner, plan = self._runners[stage], self._plans[action]
        routes = self._stages[stage].routes
        if self._pinned is not None:
            self._pinned.before_compute()
        parts, num_samples = [], 0
        for source in routes.sources:
            part, num_samples = self._take(source, stage, microbatch, run)
            parts.append(part)
        start = self.recorder.mark()
        outgoing = runner.forward(run, microbatch, parts, num_samples, plan, self._outcome)
        if num_samples:
            self.recorder.step.spans.append(ActionSpan(action, start, self.recorder.mark()))
        for destination, part in zip(routes.destinations, outgoing, strict=True):
            self._made[stage, destination, microbatch] = Message(part, num_samples)
        # In training alone: an evaluation changes no statistics.
        if action in self._measured and plan.mode is not RunMode.EVALUATE:
            self._stages[stage].statistics.start_reduction(self._wiring.reductions[stage])

    def _recompute(self, action: Action, run: Run) -> None:
        if self._pinned is not None:
            self._pinned.before_compute()
        start = self.recorder.mark()
        if self._runners[action.stage].recompute(run, _number(action)):
            self.recorder.step.spans.append(ActionSpan(action, start, self.recorder.mark()))

    def _backward(self, action: Action, run: Run) -> None:
        stage, microbatch = action.stage, action.microbatch
        assert microbatch is not None, "checked with the table"
        runner, routes = self._runners[stage], self._stages[stage].routes
        if self._pinned is not None:
            self._pinned.before_compute()
        gradients: list[torch.Tensor | None] = []
        for destination in routes.destinations:
            gradients += self._take(destination, stage, microbatch, run).nest or ()
        num_samples = runner.saved[microbatch].num_samples
        start = self.recorder.mark()
        with self._reducing(action) if action in self._ends else _NOTHING:
            parts = runner.backward(microbatch, gradients)
        if num_samples:
            self.recorder.step.spans.append(ActionSpan(action, start, self.recorder.mark()))
        for source, part in zip(routes.sources, parts, strict=True):
            if source != BATCH:
                self._made[stage, source, microbatch] = Message(part, num_samples)

    def _weight_gradients(self, action: Action, run: Run) -> None:
        if self._pinned is not None:
            self._pinned.before_compute()
        start = self.recorder.mark()
        with self._reducing(action) if action in self._ends else _NOTHING:
            has_run = self._runners[action.stage].weights(_number(action))
        if has_run:
            self.recorder.step.spans.append(ActionSpan(action, start, self.recorder.mark()))

    def _reducing(self, action: Action) -> AbstractContextManager[None]:
        """Return the block for a stage's last backward, in which buckets may be reduced."""
        is_last = action == self._last_backwards[action.stage]
        return self._reducer.overlapping(action.stage, is_last=is_last)

    def _take(self, source: int, stage: int, microbatch: int, run: Run) -> Message:
        """Return the input of a forward or the gradients for a backward, from their source."""
        if source == BATCH:
            assert run.inputs is not None, "checked before the run"
            nests, sizes = run.inputs
            return Message(self._intake.to_device(nests[microbatch]), sizes[microbatch])
        hop = source, stage, microbatch
        channel = self._incoming.get(hop)
        if channel is not None:
            return self._transport.wait(channel, run.lane, microbatch)
        message = self._made.pop(hop)
        if source > stage:
            return message
        # Detached from the graph, as if it had come from another rank.
        return Message(as_received(message.nest), message.num_samples)

    def _send(self, action: Action, run: Run) -> None:
        channel, microbatch = self._channels[action], _number(action)
        ends = channel.channel
        nest, num_samples = self._made.pop((ends.source, ends.destination, microbatch))
        self._transport.send(channel, run.lane, microbatch, nest, num_samples)

    def _post_receive(self, action: Action, run: Run) -> None:
        self._transport.post(self._channels[action], run.lane, _number(action))

    def _gather(self, action: Action, run: Run) -> None:
        shards = self._stages[action.stage].gradients.shards
        if shards is None or self._overlaps:
            return  # each layer waits for its own
        if action.bucket is None:
            shards.wait_for_all()
        else:
            shards.wait(action.bucket)

    def _plan(self, action: Action) -> ForwardPlan:
        """Return the plan of a forward, from the other actions of its micro-batch in the table."""
        others = {op for op in Op if Action(op, action.stage, action.microbatch) in self._all}
        if Op.I not in others and Op.B not in others:
            return ForwardPlan(RunMode.EVALUATE)
        mode = RunMode.RECORD if Op.R in others else RunMode.TRAIN
        # A graph that is moved to the host must not contain casts that other graphs use. Then no
        # micro-batch of the stage shares casts, as shared ones would stay until the step ends.
        shares_casts = action.stage not in self._offloading
        return ForwardPlan(mode, Op.I in others, Op.OFFLOAD in others, shares_casts)

    def _incoming_channels(self) -> dict[Hop, PlacedChannel]:
        """Return the channel of each message that this rank receives."""
        placement = self._schedule.placement
        found: dict[Hop, PlacedChannel] = {}
        for stage, own in self._stages.items():
            for other in (*own.routes.sources, *own.routes.destinations):
                for microbatch, route in enumerate(placement.route_of):
                    channel = self._wiring.channels.get(Channel(other, stage, route))
                    if channel is not None:
                        found[other, stage, microbatch] = channel
        return found

    def _exhausted(self, index: int, error: Exception) -> OutOfMemoryError:
        layers = [layer for stage in self._stages.values() for layer in stage.layers.values()]
        num_kept = sum(runner.num_kept for runner in self._runners.values())
        what = ": ".join([*getattr(error, "__notes__", ())[:1], type(error).__name__])
        return OutOfMemoryError(
            f"{self._position(index)}: {what}: {str(error).strip()}",
            MemorySnapshot.of(self._world.device, layers, num_kept),
        )

    def _position(self, index: int) -> str:
        """Return a description of an action, with its neighbours in the table."""
        if index == len(self._actions):
            return f"rank {self._world.rank}, after its last action"
        action = self._actions[index]
        around = [
            f"-> {a} <-" if i == index else str(a)
            for i, a in enumerate(self._actions)
            if abs(i - index) <= 3
        ]
        return (
            f"rank {self._world.rank}, stage {action.stage}, micro-batch {action.microbatch}, "
            f"action {action} (table: {' '.join(around)})"
        )

    def _note_gathering(self) -> None:
        """Record gathers of sharded parameters that overlap with this run's compute.

        They started after the optimizer's step; only the rest from now on is recorded.
        """
        begin = self.recorder.mark()
        for index, stage in self._stages.items():
            shards = stage.gradients.shards
            for number, pending in shards.gathering if shards is not None else ():
                self.recorder.step.add_overlapped(Action(Op.UNSHARD, index, number), begin, pending)

    def _start_reduction(self, stage: int, number: int) -> None:
        """Start summing a bucket over the copies, and record when it runs."""
        own = self._stages[stage]
        own.statistics.start_reduction(self._wiring.reductions[stage])  # if no forward came here
        if own.squares is not None:
            # Afterwards the bucket contains the sum over all copies.
            own.squares.before_reduction(own.gradients.parameters_of(number))
        start = self.recorder.mark()
        for pending in own.gradients.start_reduction(number):
            self.recorder.step.add_overlapped(Action(Op.REDUCE_GRAD, stage, number), start, pending)


def _number(action: Action) -> int:
    assert action.microbatch is not None, f"{action} has no micro-batch"
    return action.microbatch
