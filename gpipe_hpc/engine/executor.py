"""Run a rank's list of actions: a table of binders makes each action a call, once."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from gpipe_hpc.comm.nests import Nest, map_tensors
from gpipe_hpc.comm.transport.base import Message, PlacedChannel
from gpipe_hpc.comm.transport.wire import assemble, disassemble
from gpipe_hpc.comm.world import World
from gpipe_hpc.engine.feed import Feed
from gpipe_hpc.engine.loss import LossFunction, LossTerm, check_graph, loss_term
from gpipe_hpc.engine.precision import keeping_casts
from gpipe_hpc.engine.recorder import Recorder
from gpipe_hpc.engine.routes import BATCH
from gpipe_hpc.engine.segment import Noted
from gpipe_hpc.engine.stage import Stage
from gpipe_hpc.engine.state.buffers import Lasting
from gpipe_hpc.engine.state.keyed import Keyed
from gpipe_hpc.engine.state.passage import LayerState
from gpipe_hpc.engine.wiring import Wiring
from gpipe_hpc.engine.work import Keep, Part, Recipe, StageWork, Start
from gpipe_hpc.errors import ActionError, DataError, memory_remedy
from gpipe_hpc.models import Reports, reporting
from gpipe_hpc.schedule import Action, Channel, Op, Schedule, channel_of

Place = tuple[int, int]
"""A stage and a micro-batch."""

Hop = tuple[int, int, int]
"""From a stage to a stage, and a micro-batch."""

Call = Callable[[], None]


@dataclass
class Outcome:
    """What a run left on this rank, by micro-batch of this replica.

    `noted`: what layers reported, the loss function as the layer behind the last. `samples`: how
    many went through each stage here.
    """

    losses: dict[int, LossTerm] = field(default_factory=dict)
    outputs: dict[int, Nest] = field(default_factory=dict)
    noted: dict[int, list[Noted]] = field(default_factory=lambda: defaultdict(list))
    samples: dict[int, int] = field(default_factory=lambda: defaultdict(int))


class Executor:
    """Run the actions of one rank, in their order, on its stages.

    `schedule` is lowered; `rank` is the position in the pipeline. All stores are empty after a
    run. A failure names rank, stage, micro-batch and action.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, Stage],
        wiring: Wiring,
        world: World,
        num_layers: int,
    ) -> None:
        self._schedule = schedule
        self._stages = stages
        self._wiring = wiring
        self._world = world
        self._num_layers = num_layers
        self._precision = next((stage.precision for stage in stages.values()), "float32")
        self.recorder = Recorder(world.device)
        # Made and not yet taken by the next stage or a SEND: outputs upwards, gradients downwards.
        self._made: dict[Hop, Message] = {}
        self._feed = _no_feed()
        self._outcome = Outcome()
        self._seeds: dict[torch.dtype, torch.Tensor] = {}  # where backward starts, by dtype
        self._loss_lasting = Lasting()
        self._loss_state: tuple[LossFunction, LayerState] | None = None
        self._works = {i: StageWork(stage, self, wiring.peers) for i, stage in stages.items()}
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
            Op.OFFLOAD: self._bind_offload,
            Op.FETCH: self._bind_fetch,
        }
        self._actions = schedule.ranks[rank]
        self._all = frozenset(self._actions)
        self._stage_of = {layer: stage for stage in stages.values() for layer in stage.layers}
        self._last_forwards = {a.stage: a for a in self._actions if a.op is Op.F}
        self._program = [(action, binders[action.op](action)) for action in self._actions]

    def run(self, feed: Feed) -> Outcome:
        """Run the whole list on `feed`; leaves torch's random generators as they were.

        Raises ActionError if an action failed, ConnectionError or TimeoutError if a wait did.
        """
        self._feed, self._outcome, self._seeds = feed, Outcome(), {}
        self.recorder.start_step()
        for work in self._works.values():
            work.begin()
        index = 0
        try:
            # Under the caller's inference mode, writes in place could not be told.
            with torch.inference_mode(False), keeping_casts(self._precision, self._world.device):
                while index < len(self._program):
                    self._world.activity, call = self._program[index]
                    call()
                    index += 1
            self._world.activity = "waiting until all it sent has left"
            self._wiring.transport.finish()
        except (ConnectionError, TimeoutError) as error:
            raise type(error)(f"{self._position(index)}: {error}") from error
        except Exception as error:
            what = ": ".join([*getattr(error, "__notes__", ())[:1], type(error).__name__])
            raise ActionError(
                f"{self._position(index)}: {what}: {error}{memory_remedy(error)}"
            ) from error
        finally:
            for work in self._works.values():
                work.end()
            self._loss_lasting.settle()
        self._world.activity = "ending"
        num_left = sum(work.num_kept for work in self._works.values())
        num_left += len(self._made)
        assert num_left == 0, f"rank {self._world.rank}: {num_left} stored values never used"
        # The batch and the outputs belong to the caller alone from here on.
        outcome, self._feed, self._outcome = self._outcome, _no_feed(), Outcome()
        return outcome

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

        def forward() -> None:
            messages = [take() for take in takes]
            num_samples = messages[0].num_samples
            start = self.recorder.mark()
            outputs = work.forward(
                microbatch,
                [message.nest for message in messages],
                num_samples,
                self._feed.keys(microbatch),
                recipe,
            )
            if num_samples:
                self.recorder.add(action, start)
                self._outcome.samples[stage] += num_samples
            for hop, output in zip(hops, outputs, strict=True):
                self._made[hop] = Message(output, num_samples)
            if ends_step:
                statistics.start_reduction(copies)

        return forward

    def _recipe(self, place: Place) -> Recipe:
        splits = Action(Op.I, *place) in self._all
        if not splits and Action(Op.B, *place) not in self._all:
            return Recipe(Keep.NOTHING)
        keep = Keep.INPUT if Action(Op.R, *place) in self._all else Keep.GRAPH
        return Recipe(keep, splits, offloads=Action(Op.OFFLOAD, *place) in self._all)

    def _bind_weights(self, action: Action) -> Call:
        stage, microbatch = _place(action)
        work = self._works[stage]

        def weights() -> None:
            start = self.recorder.mark()
            if work.weights(microbatch):
                self.recorder.add(action, start)

        return weights

    def _bind_recompute(self, action: Action) -> Call:
        stage, microbatch = _place(action)
        work = self._works[stage]

        def recompute() -> None:
            start = self.recorder.mark()
            if work.recompute(microbatch, self._feed.keys(microbatch)):
                self.recorder.add(action, start)

        return recompute

    def _bind_offload(self, action: Action) -> Call:
        stage, microbatch = _place(action)
        return partial(self._works[stage].offload, microbatch)

    def _bind_fetch(self, action: Action) -> Call:
        stage, microbatch = _place(action)
        return partial(self._works[stage].fetch, microbatch)

    def _bind_backward(self, action: Action) -> Call:
        stage, microbatch = _place(action)
        work, routes = self._works[stage], self._stages[stage].routes
        takes = [self._bind_take(edge.stage, stage, microbatch) for edge in routes.destinations]
        hops = [(stage, edge.stage, microbatch) for edge in routes.sources if edge.stage != BATCH]

        def backward() -> None:
            gradients = [gradient for take in takes for gradient in take().nest or ()]
            num_samples = work.num_samples(microbatch)
            start = self.recorder.mark()
            parts = work.backward(microbatch, gradients)
            if num_samples:
                self.recorder.add(action, start)
            for hop, part in zip(hops, parts, strict=False):
                self._made[hop] = Message(part, num_samples)

        return backward

    def _bind_take(self, source: int, stage: int, microbatch: int) -> Callable[[], Message]:
        """Return how a stage gets what another one made for it: an output, or gradients."""
        if source == BATCH:
            return lambda: self._first_input(microbatch)
        route = self._schedule.placement.route_of[microbatch]
        channel = self._wiring.channels.get(Channel(source, stage, route))
        if channel is not None:
            return lambda: self._wiring.transport.wait(channel, self._feed.lane, microbatch)
        hop = (source, stage, microbatch)
        if source > stage:
            return lambda: self._made.pop(hop)
        return lambda: _handed_over(self._made.pop(hop))

    def _bind_send(self, action: Action) -> Call:
        microbatch = _place(action)[1]
        channel, transport = self._channel(action), self._wiring.transport
        hop = (channel.channel.source, channel.channel.destination, microbatch)

        def send() -> None:
            nest, num_samples = self._made.pop(hop)
            transport.send(channel, self._feed.lane, microbatch, nest, num_samples)

        return send

    def _bind_receive(self, action: Action) -> Call:
        channel, transport = self._channel(action), self._wiring.transport
        microbatch = _place(action)[1]
        return lambda: transport.post(channel, self._feed.lane, microbatch)

    def _bind_reduce(self, action: Action) -> Call:
        stage, group = self._stages[action.stage], self._wiring.reductions[action.stage]

        def reduce() -> None:
            stage.statistics.start_reduction(group)  # if no forward of the stage came here
            stage.gradients.start_reduction(group)

        return reduce

    def _channel(self, transfer: Action) -> PlacedChannel:
        return self._wiring.channels[channel_of(transfer, self._schedule.placement)]

    def _first_input(self, microbatch: int) -> Message:
        feed = self._feed
        assert feed.inputs is not None and feed.num_samples is not None, "checked before the run"
        return Message(self._on_device(feed.inputs[microbatch]), feed.num_samples[microbatch])

    def _on_device(self, nest: Nest) -> Nest:
        def moved(tensor: torch.Tensor) -> torch.Tensor:
            own = tensor.clone() if tensor.is_inference() else tensor.detach()
            return own.to(self._world.device, non_blocking=True)

        return map_tensors(moved, nest)

    def note(self, part: Part, noted: list[Noted]) -> list[Start]:
        """Take what layers of one micro-batch reported; return the losses, for backward."""
        if not part.again:
            self._outcome.noted[part.microbatch] += [each.without_graph() for each in noted]
            for layer, reports in noted:
                if reports.statistics:
                    self._stage_of[layer].statistics.note(part.microbatch, reports.statistics)
        return [self._start(total) for each in noted for total in each.reports.losses.values()]

    def finish(self, part: Part, output: Nest) -> list[Start]:
        """Take the loss, or the output, at the end of the last stage; return the loss."""
        feed, (microbatch, num_samples, again, _) = self._feed, part
        if feed.loss_fn is None:
            # Copied: the last layer may write into it again for the next micro-batch.
            self._outcome.outputs[microbatch] = map_tensors(lambda t: t.detach().clone(), output)
            return []
        samples = num_samples if feed.target_samples is None else feed.target_samples[microbatch]
        if samples != num_samples:
            raise DataError(
                f"targets: expected {num_samples} samples in micro-batch {microbatch}, as its "
                f"inputs have, got {samples}; give every rank the same slice of the batch"
            )
        target = None if feed.targets is None else self._on_device(feed.targets[microbatch])
        keyed = self._stages[self._schedule.num_stages - 1].keyed
        state, passage = self._state_of_loss(feed.loss_fn, keyed), part.passage
        alone = keyed.alone([state.draws], passage.start(self._num_layers))
        number = feed.keys(microbatch)(self._num_layers)
        is_idle = microbatch != 0 and not passage.looks and state.is_idle
        if not is_idle:
            passage.begin(state)
        with alone as drawing, reporting(Reports()) as reports:
            if is_idle:
                drawing.seed_torchs(number)
                seeded: AbstractContextManager[object] = nullcontext()
            else:
                seeded = state.seed(drawing, number, checks=microbatch == 0)
            try:
                with seeded:
                    term = loss_term(feed.loss_fn, output, target, num_samples)
                check_graph(term, output)
            except Exception as error:
                passage.fail(error)
                raise
            if not is_idle:
                passage.end(state, term.total, state.end(drawing))
        passage.close([state], drawing, keyed)
        if not again:
            self._outcome.losses[microbatch] = term.without_graph()
        starts = [self._start(term.total)]
        if reports:
            starts += self.note(part, [Noted(self._num_layers, reports)])
        return starts

    def _state_of_loss(self, loss_fn: LossFunction, keyed: Keyed) -> LayerState:
        """Return what is known of the state that a loss changes; a module may have buffers."""
        known = self._loss_state
        if known is None or known[0] is not loss_fn:
            module = loss_fn if isinstance(loss_fn, nn.Module) else nn.Module()
            name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
            where = f"loss_fn ({name})"
            state = LayerState(self._num_layers, module, where, keyed, self._loss_lasting)
            known = self._loss_state = loss_fn, state
        return known[1]

    def _start(self, total: torch.Tensor) -> Start:
        if self._feed.seed is None:
            return Start(total, torch.ones_like(total))
        if total.dtype not in self._seeds:
            self._seeds[total.dtype] = self._feed.seed.to(total.dtype)
        # A copy: a loss of the user's may write into what its backward is given.
        return Start(total, self._seeds[total.dtype].clone())


def _no_feed() -> Feed:
    return Feed("", lambda _: lambda _: 0)


def _place(action: Action) -> Place:
    assert action.microbatch is not None, f"{action} has no micro-batch"
    return action.stage, action.microbatch


def _handed_over(message: Message) -> Message:
    """Return a boundary as the next stage of the same rank gets it: cut off from the graph."""
    return Message(assemble(*disassemble(message.nest)), message.num_samples)
