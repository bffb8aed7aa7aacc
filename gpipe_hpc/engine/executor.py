"""Run a rank's list of actions: a table of binders makes each action a call, once."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from gpipe_hpc.comm.transport.base import Message, PlacedChannel
from gpipe_hpc.comm.transport.wire import handed_over
from gpipe_hpc.comm.world import World
from gpipe_hpc.data_parallel import GradientReducer
from gpipe_hpc.engine.backward.outsiders import Outsiders
from gpipe_hpc.engine.batch.cutting import Output
from gpipe_hpc.engine.batch.intake import Intake
from gpipe_hpc.engine.layers.precision import keeping_casts
from gpipe_hpc.engine.memory.host_room import HostRoom
from gpipe_hpc.engine.memory.standing import Exhausted, Standing
from gpipe_hpc.engine.microbatch import Keep, Made, Recipe, StageWork
from gpipe_hpc.engine.recorder import Recorder
from gpipe_hpc.engine.remedies import remedy_of
from gpipe_hpc.engine.run import Run
from gpipe_hpc.engine.stages.routes import BATCH
from gpipe_hpc.engine.stages.stage import Stage
from gpipe_hpc.engine.stages.wiring import Wiring
from gpipe_hpc.engine.sums.loss import LossTerm, Noted
from gpipe_hpc.errors import ActionError
from gpipe_hpc.schedule import Action, Channel, Op, Schedule, channel_of
from gpipe_hpc.schedule.table.actions import COMPUTE
from gpipe_hpc.schedule.table.lifetimes import ENDS_BACKWARD

Place = tuple[int, int]
"""A stage and a micro-batch."""

Hop = tuple[int, int, int]
"""From a stage to a stage, and a micro-batch."""


class Gain(NamedTuple):
    """What the forward of a stage adds to the outcome of a run."""

    stage: int
    microbatch: int
    num_samples: int
    made: Made


Call = Callable[[Run], Gain | None]
"""An action, bound to what it works with."""


@dataclass
class Outcome:
    """What a run left on this rank, by micro-batch of this replica.

    `noted`: what layers reported, the loss function as the layer behind the last. `samples`: how
    many went through each stage here.
    """

    losses: dict[int, LossTerm] = field(default_factory=dict)
    outputs: dict[int, Output] = field(default_factory=dict)
    noted: dict[int, list[Noted]] = field(default_factory=lambda: defaultdict(list))
    samples: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, gain: Gain) -> None:
        """Add what one forward has made."""
        stage, microbatch, num_samples, made = gain
        self.samples[stage] += num_samples
        if made.noted:
            self.noted[microbatch] += made.noted
        if made.term is not None:
            self.losses[microbatch] = made.term
        for output in made.outputs:
            self.outputs[microbatch] = Output(output, num_samples)


class Executor:
    """Run the actions of one rank, in their order, on its stages.

    `schedule` is lowered; `rank` is the position in the pipeline. `overlaps`: whether buckets of
    gradients may leave within a stage's last backward, and gathered parameters be waited for within
    its first forward, layer by layer. All stores are empty after a run. A failure
    names rank, stage, micro-batch and action.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, Stage],
        wiring: Wiring,
        world: World,
        *,
        overlaps: bool = True,
        outsiders: Outsiders | None = None,
    ) -> None:
        self._schedule = schedule
        self._stages = stages
        self._wiring = wiring
        self._world = world
        self._precision = next((stage.precision for stage in stages.values()), "float32")
        self.recorder = Recorder(world.device)
        # Made and not yet taken by the next stage or a SEND: outputs upwards, gradients downwards.
        self._made: dict[Hop, Message] = {}
        self._intake = Intake(world.device)
        self._actions = schedule.ranks[rank]
        self._offloading = {a.stage for a in self._actions if a.op is Op.OFFLOAD}
        self._room = HostRoom(world.device) if self._offloading else None
        sending = {a.stage for a in self._actions if a.op is Op.SEND_F}
        self._works = {
            i: StageWork(
                stage,
                wiring.peers,
                self._intake,
                self._room,
                sends=i in sending,
                outsiders=outsiders,
            )
            for i, stage in stages.items()
        }
        binders: dict[Op, Callable[[Action], Call]] = {
            Op.F: self._bind_forward,
            Op.R: self._bind_recompute,
            Op.B: self._bind_backward,
            Op.I: self._bind_backward,
            Op.W: self._bind_weights,
            Op.SEND_F: self._bind_send,
            Op.SEND_B: self._bind_send,
            Op.RECV_F: self._bind_receive,
            Op.RECV_B: self._bind_receive,
            Op.REDUCE_GRAD: self._bind_reduce,
            Op.UNSHARD: self._bind_gather,
            Op.OFFLOAD: self._bind_offload,
            Op.FETCH: self._bind_fetch,
        }
        self._all = frozenset(self._actions)
        self._reducer = GradientReducer(
            [(a.stage, a.bucket) for a in self._actions if a.op is Op.REDUCE_GRAD],
            {index: stage.gradients for index, stage in stages.items()},
            self._start_reduction,
        )
        self._overlaps = overlaps
        self._last_backwards = {a.stage: a for a in self._actions if a.op in ENDS_BACKWARD}
        self._last_forwards = {a.stage: a for a in self._actions if a.op is Op.F}
        calls = ((action, binders[action.op](action)) for action in self._actions)
        self._program = [(action, self._behind_copies(action, call)) for action, call in calls]

    def run(self, run: Run) -> Outcome:
        """Run the whole list; leaves torch's random generators as they were.

        Raises ActionError if an action failed (Exhausted where it found no memory),
        ConnectionError or TimeoutError if a wait did.
        """
        outcome = Outcome()
        self.recorder.start_step()
        for work in self._works.values():
            work.begin()
        self._reducer.begin()
        self._note_gathering()
        index = 0
        try:
            # Under the caller's inference mode, writes in place could not be told.
            with torch.inference_mode(False), keeping_casts(self._precision, self._world.device):
                while index < len(self._program):
                    self._world.activity, call = self._program[index]
                    gain = call(run)
                    if gain is not None:
                        outcome.add(gain)
                    index += 1
            if self._room is not None:
                self._room.end()
            self._world.activity = "waiting until all it sent has left"
            self._wiring.transport.finish()
            for work in self._works.values() if self._last_backwards else ():
                work.refuse_draws()
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
            # A step that failed leaves nothing behind: no memory, and nothing for the next one.
            num_left = len(self._made) + sum(work.num_kept for work in self._works.values())
            self._made.clear()
            if self._room is not None and index < len(self._program):
                with suppress(RuntimeError):  # of a broken device: what broke it is raised above
                    self._room.end()
            for work in self._works.values():
                work.end()
        self._world.activity = "ending"
        assert num_left == 0, f"rank {self._world.rank}: {num_left} stored values never used"
        return outcome

    def _behind_copies(self, action: Action, call: Call) -> Call:
        """Return a call ahead of which there is room: the compute has waited for what has left."""
        room = self._room
        if room is None or action.op not in COMPUTE:
            return call

        def behind_copies(run: Run) -> Gain | None:
            room.before_compute()
            return call(run)

        return behind_copies

    def _exhausted(self, index: int, error: Exception) -> Exhausted:
        layers = [layer for stage in self._stages.values() for layer in stage.layers.values()]
        num_kept = sum(work.num_kept for work in self._works.values())
        what = ": ".join([*getattr(error, "__notes__", ())[:1], type(error).__name__])
        return Exhausted(
            f"{self._position(index)}: {what}: {str(error).strip()}",
            Standing.of(self._world.device, layers, num_kept),
        )

    def _position(self, index: int) -> str:
        """Describe an action and its surroundings in the table."""
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

    def _bind_forward(self, action: Action) -> Call:
        place = stage, microbatch = _place(action)
        work, recipe = self._works[stage], self._recipe(place)
        routes = self._stages[stage].routes
        takes = [self._bind_take(edge.stage, stage, microbatch) for edge in routes.sources]
        hops = [(stage, edge.stage, microbatch) for edge in routes.destinations]

        # In training alone: an evaluation changes no statistics.
        ends_step = recipe.keep is not Keep.NOTHING and action == self._last_forwards[stage]
        statistics, copies = self._stages[stage].statistics, self._wiring.reductions[stage]

        def forward(run: Run) -> Gain:
            messages = [take(run) for take in takes]
            num_samples = messages[0].num_samples
            start = self.recorder.mark()
            parts = [message.nest for message in messages]
            made = work.forward(run, microbatch, parts, num_samples, recipe)
            if num_samples:
                self.recorder.add(action, start)
            for hop, part in zip(hops, made.parts, strict=True):
                self._made[hop] = Message(part, num_samples)
            if ends_step:
                statistics.start_reduction(copies)
            return Gain(stage, microbatch, num_samples, made)

        return forward

    def _recipe(self, place: Place) -> Recipe:
        splits = Action(Op.I, *place) in self._all
        if not splits and Action(Op.B, *place) not in self._all:
            return Recipe(Keep.NOTHING)
        keep = Keep.INPUT if Action(Op.R, *place) in self._all else Keep.GRAPH
        # A graph that moves to the host may hold no cast that others use as well. Then those that
        # stay make their own, too, and let go of them: shared ones would last until the step ends.
        is_shared = place[0] not in self._offloading
        return Recipe(keep, splits, Action(Op.OFFLOAD, *place) in self._all, is_shared)

    def _bind_recompute(self, action: Action) -> Call:
        stage, microbatch = _place(action)
        work = self._works[stage]

        def recompute(run: Run) -> None:
            start = self.recorder.mark()
            if work.recompute(run, microbatch):
                self.recorder.add(action, start)

        return recompute

    def _bind_backward(self, action: Action) -> Call:
        stage, microbatch = _place(action)
        work, routes = self._works[stage], self._stages[stage].routes
        takes = [self._bind_take(edge.stage, stage, microbatch) for edge in routes.destinations]
        hops = [(stage, edge.stage, microbatch) for edge in routes.sources if edge.stage != BATCH]
        watch = self._bind_watch(action)

        def backward(run: Run) -> None:
            gradients = [gradient for take in takes for gradient in take(run).nest or ()]
            num_samples = work.num_samples(microbatch)
            start = self.recorder.mark()
            with watch():
                parts = work.backward(microbatch, gradients)
            if num_samples:
                self.recorder.add(action, start)
            for hop, part in zip(hops, parts, strict=False):
                self._made[hop] = Message(part, num_samples)

        return backward

    def _bind_weights(self, action: Action) -> Call:
        stage, microbatch = _place(action)
        work, watch = self._works[stage], self._bind_watch(action)

        def weights(run: Run) -> None:
            start = self.recorder.mark()
            with watch():
                has_run = work.weights(microbatch)
            if has_run:
                self.recorder.add(action, start)

        return weights

    def _bind_watch(self, action: Action) -> Callable[[], AbstractContextManager[None]]:
        """Return what goes around a backward: of a stage's last one, what lets buckets leave."""
        last = self._last_backwards[action.stage]
        is_summed = self._wiring.reductions[action.stage].size > 1
        if self._overlaps and is_summed and action.microbatch == last.microbatch:
            return partial(self._reducer.overlapping, action.stage, is_last=action == last)
        return nullcontext

    def _bind_offload(self, action: Action) -> Call:
        stage, microbatch = _place(action)
        work = self._works[stage]
        return lambda run: work.offload(microbatch)

    def _bind_fetch(self, action: Action) -> Call:
        stage, microbatch = _place(action)
        work = self._works[stage]
        return lambda run: work.fetch(microbatch)

    def _bind_take(self, source: int, stage: int, microbatch: int) -> Callable[[Run], Message]:
        """Return how a stage gets what another one made for it: an output, or gradients."""
        intake, transport = self._intake, self._wiring.transport
        if source == BATCH:
            return lambda run: run.input(microbatch, intake)
        route = self._schedule.placement.route_of[microbatch]
        channel = self._wiring.channels.get(Channel(source, stage, route))
        if channel is not None:
            return lambda run: transport.wait(channel, run.lane, microbatch)
        hop = (source, stage, microbatch)
        if source > stage:
            return lambda run: self._made.pop(hop)
        return lambda run: _handed_over(self._made.pop(hop))

    def _bind_send(self, action: Action) -> Call:
        microbatch = _place(action)[1]
        channel, transport = self._channel(action), self._wiring.transport
        hop = (channel.channel.source, channel.channel.destination, microbatch)

        def send(run: Run) -> None:
            nest, num_samples = self._made.pop(hop)
            transport.send(channel, run.lane, microbatch, nest, num_samples)

        return send

    def _bind_receive(self, action: Action) -> Call:
        channel, transport = self._channel(action), self._wiring.transport
        microbatch = _place(action)[1]
        return lambda run: transport.post(channel, run.lane, microbatch)

    def _bind_reduce(self, action: Action) -> Call:
        return lambda run: self._reducer.reach(action.stage, action.bucket)

    def _bind_gather(self, action: Action) -> Call:
        gradients = self._stages[action.stage].gradients

        def gather(run: Run) -> None:
            shards = gradients.shards
            if shards is None or self._overlaps:
                return  # each layer waits for its own
            if action.bucket is None:
                shards.wait_for_all()
            else:
                shards.wait(action.bucket)

        return gather

    def _note_gathering(self) -> None:
        """Note from when to when parameters are gathered beside this run's compute.

        Their gathering began behind the optimizer's step; what counts is what is left of it.
        """
        begin = self.recorder.mark()
        for index, stage in self._stages.items():
            shards = stage.gradients.shards
            for number, pending in shards.gathering if shards is not None else ():
                self.recorder.add_beside(Action(Op.UNSHARD, index, number), begin, pending)

    def _start_reduction(self, stage: int, number: int) -> None:
        """Start summing a bucket over the copies, and record when it runs."""
        own = self._stages[stage]
        own.statistics.start_reduction(self._wiring.reductions[stage])  # if no forward came here
        if own.squares is not None:
            # Afterwards the bucket holds what all copies add.
            own.squares.before_reduction(own.gradients.parameters_of(number))
        start = self.recorder.mark()
        for pending in own.gradients.start_reduction(number):
            self.recorder.add_beside(Action(Op.REDUCE_GRAD, stage, number), start, pending)

    def _channel(self, transfer: Action) -> PlacedChannel:
        return self._wiring.channels[channel_of(transfer, self._schedule.placement)]


def _place(action: Action) -> Place:
    assert action.microbatch is not None, f"{action} has no micro-batch"
    return action.stage, action.microbatch


def _handed_over(message: Message) -> Message:
    """Return a boundary as the next stage of the same rank gets it: cut off from the graph."""
    return Message(handed_over(message.nest), message.num_samples)
