"""S-Caffe's ladder: blocking, overlapped broadcast, and overlapped reduction.

Awan et al., S-Caffe, PPoPP 2017. In a step the root's parameters are broadcast, each rank computes
its gradients, their sum is reduced to the root, and the root updates. The three designs:

    blocking     all parameters at once, then compute, then all gradients at once (SC-B)
    broadcast    each layer's forward waits for its own parameters only (SC-OB)
    both         each layer's gradients are also reduced as soon as they exist (SC-OBR)

The simulator runs each design on one rank with a stage per layer. The measured run uses the backend
and layers that sleep for the compute time of a device, so that the processor is free for
communication, as next to a GPU.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from experiments.outer.collectives.costs import FORMS, Link
from experiments.outer.collectives.figures import markdown
from experiments.outer.collectives.running import run_ranks
from experiments.outer.collectives.tuning import predicted
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.comm.world.world import World, collective_errors
from gpipe_hpc.schedule import (
    Action,
    Costs,
    Event,
    Op,
    Schedule,
    Timeline,
    build,
    simulate,
)
from gpipe_hpc.schedule.passes.gathers import add_gathers
from gpipe_hpc.schedule.passes.lowering import lower

DESIGNS: Final[Mapping[str, tuple[bool, bool]]] = MappingProxyType(
    {"blocking": (False, False), "broadcast": (True, False), "both": (True, True)}
)
"""For each design: whether the broadcast is per layer, and whether the reduction is."""
_MODULE: Final = "experiments.outer.collectives.ladder"
_LR: Final = 0.1


class Layers(NamedTuple):
    """Seconds of each layer, first layer first, and of collectives over all layers at once."""

    forward_s: list[float]
    backward_s: list[float]
    broadcast_s: list[float]
    reduce_s: list[float]
    broadcast_all_s: float
    reduce_all_s: float


# Simulated.


def table(num_layers: int) -> Schedule:
    """Return one rank's step with a stage per layer, gathered before it and reduced after it."""
    bare = build("looped_bfs", ranks=1, microbatches=1, stages_per_rank=num_layers)
    buckets = dict.fromkeys(range(num_layers), 1)
    return add_gathers(lower(bare, buckets), buckets)


def simulated(layers: Layers, design: str) -> Timeline:
    """Return the simulated step of a design.

    Without overlap, all parameters are one buffer before the first layer, and all gradients one
    buffer after the last backward.
    """
    gathers, reduces = DESIGNS[design]
    others = [0.0] * (len(layers.forward_s) - 1)
    costs = Costs(
        forward=layers.forward_s,
        backward=layers.backward_s,
        gather=layers.broadcast_s if gathers else [layers.broadcast_all_s, *others],
        reduction=layers.reduce_s if reduces else [layers.reduce_all_s, *others],
    )
    return simulate(table(len(layers.forward_s)), costs)


# Measured.


class Solver:
    """The layers of one rank, and a training step of each design; `weights` is one flat vector.

    `compute_s` is the sleep of a layer's forward; its backward sleeps twice that.
    """

    def __init__(self, world: World, widths: Sequence[int], compute_s: float) -> None:
        self._group, self._rank = world.group([tuple(range(world.size))]).torch_group, world.rank
        self._compute_s, self._num_ranks = compute_s, world.size
        torch.manual_seed(0)
        self.layers = [torch.nn.Linear(a, b, bias=False) for a, b in pairwise(widths)]
        sizes = [layer.weight.numel() for layer in self.layers]
        # Flat vectors, so that all layers can be one buffer.
        self.weights, self._all_gradients = torch.zeros(sum(sizes)), torch.zeros(sum(sizes))
        self._weights = torch.split(self.weights, sizes)
        self._gradients = torch.split(self._all_gradients, sizes)
        for layer, part in zip(self.layers, self._weights, strict=True):
            if self._rank == 0:  # other ranks receive the root's weights
                part.copy_(layer.weight.detach().view(-1))
            layer.weight.data = part.view_as(layer.weight)

    def step(self, design: str, inputs: torch.Tensor) -> Timeline:
        """Train one step and return its timeline. The loss is half the sum of squares."""
        gathers, reduces = DESIGNS[design]
        began_s = time.perf_counter()
        events: list[Event] = []
        moved: list[_Moved] = []
        parts = self._weights if gathers else [self.weights]
        coming = [self._start(dist.broadcast, Op.UNSHARD, i, p, moved) for i, p in enumerate(parts)]
        kept = []
        for i, layer in enumerate(self.layers):
            if i < len(coming):
                coming[i]()
            start_s = time.perf_counter()
            own = inputs.detach().requires_grad_()
            time.sleep(self._compute_s)
            inputs = layer(own)
            kept.append((own, inputs))
            events.append(Event(0, Action(Op.F, i, 0), start_s, time.perf_counter()))
        gradient = inputs.detach() / self._num_ranks
        leaving: list[Callable[[], None]] = []
        for i in reversed(range(len(kept))):
            start_s = time.perf_counter()
            own, output = kept[i]
            time.sleep(2 * self._compute_s)
            torch.autograd.backward(output, gradient)
            weight = self.layers[i].weight
            assert own.grad is not None and weight.grad is not None, "both need gradients"
            gradient = own.grad
            self._gradients[i].copy_(weight.grad.view(-1))
            weight.grad = None
            events.append(Event(0, Action(Op.B, i, 0), start_s, time.perf_counter()))
            if reduces:
                part = self._gradients[i]
                leaving.append(self._start(dist.reduce, Op.REDUCE_GRAD, i, part, moved))
        if not reduces:
            leaving = [self._start(dist.reduce, Op.REDUCE_GRAD, 0, self._all_gradients, moved)]
        for wait in leaving:
            wait()
        if self._rank == 0:
            self.weights -= _LR * self._all_gradients
        return self._timeline(began_s, events, moved, f"{design}, measured")

    def _start(
        self,
        collective: Callable[..., dist.Work | None],
        op: Op,
        i: int,
        tensor: torch.Tensor,
        moved: list["_Moved"],
    ) -> Callable[[], None]:
        """Start a collective and record its end; return a function that waits for it."""
        one = _Moved(op, i, time.perf_counter())
        moved.append(one)
        work = collective(tensor, 0, group=self._group, async_op=True)
        assert work is not None, "this rank is a member"
        work.get_future().add_done_callback(lambda _: one.end())
        return lambda: _waited(work)

    def _timeline(
        self, began_s: float, events: list[Event], moved: list["_Moved"], name: str
    ) -> Timeline:
        """Return the events of the step; collectives of one kind follow each other."""
        ended_s = time.perf_counter()
        for op in (Op.UNSHARD, Op.REDUCE_GRAD):
            before_s = began_s
            for one in sorted((m for m in moved if m.op is op), key=lambda m: m.end_s or ended_s):
                end_s = one.end_s or ended_s
                events.append(
                    Event(0, Action(op, one.layer, None), max(before_s, one.start_s), end_s)
                )
                before_s = end_s
        shifted = [Event(0, e.action, e.start_s - began_s, e.end_s - began_s) for e in events]
        return Timeline((tuple(shifted),), len(self.layers), 1, name)

    def alone_s(self, repeats: int) -> Layers:
        """Return the time of each part alone: medians of blocking calls."""
        inputs = torch.ones(1, self.layers[0].in_features)
        computed: dict[Op, list[list[float]]] = {Op.F: [], Op.B: []}
        for _ in range(repeats):
            events = self.step("blocking", inputs).events[0]
            for op, rows in computed.items():
                own = sorted((e.action.stage, e.duration_s) for e in events if e.action.op is op)
                rows.append([duration_s for _, duration_s in own])
        moved = {
            collective: [self._alone_s(collective, part, repeats) for part in self._weights]
            for collective in (dist.broadcast, dist.reduce)
        }
        return Layers(
            _medians(computed[Op.F]),
            _medians(computed[Op.B]),
            moved[dist.broadcast],
            moved[dist.reduce],
            self._alone_s(dist.broadcast, self.weights, repeats),
            self._alone_s(dist.reduce, self.weights, repeats),
        )

    def _alone_s(
        self, collective: Callable[..., object], like: torch.Tensor, repeats: int
    ) -> float:
        took_s, tensor = [], torch.zeros_like(like)
        for _ in range(repeats):
            dist.barrier(group=self._group)
            start_s = time.perf_counter()
            collective(tensor, 0, group=self._group)
            took_s.append(time.perf_counter() - start_s)
        return statistics.median(took_s)


class _Moved:
    """A collective in progress; a thread of the backend records its end."""

    def __init__(self, op: Op, layer: int, start_s: float) -> None:
        self.op, self.layer, self.start_s = op, layer, start_s
        self.end_s: float | None = None

    def end(self) -> None:
        """Record the end."""
        self.end_s = time.perf_counter()


def _waited(work: dist.Work) -> None:
    work.wait()


class LadderResult(NamedTuple):
    """Times of the layers alone, and the step times of each design.

    `difference` is the largest difference of the designs' final weights, relative to the largest
    weight.
    """

    layers: Layers
    step_s: dict[str, list[float]]
    difference: float

    @classmethod
    def of(cls, read: dict[str, Any]) -> "LadderResult":
        """Return the results read from JSON."""
        return cls(**{**read, "layers": Layers(*read["layers"])})


def measured(world: World, widths: Sequence[int], compute_s: float, steps: int) -> LadderResult:
    """Train with each design in turn; the same call on all ranks.

    Steps of the designs alternate, so that other load affects all equally. A step takes as long as
    on its slowest rank.
    """
    group = world.group([tuple(range(world.size))])
    solvers = {design: Solver(world, widths, compute_s) for design in DESIGNS}
    layers = Solver(world, widths, compute_s).alone_s(5)
    timelines: dict[str, list[Timeline]] = {design: [] for design in DESIGNS}
    generator = torch.Generator().manual_seed(world.rank)
    for number in range(1 + steps):
        inputs = torch.randn(1, widths[0], generator=generator)
        for design, solver in solvers.items():
            group.all_reduce(torch.zeros(1))
            timeline = solver.step(design, inputs)
            if number:
                timelines[design].append(timeline)
    own = {design: [t.makespan for t in each] for design, each in timelines.items()}
    by_rank = group.all_gather_object(own)
    step_s = {
        design: [max(each) for each in zip(*(rank[design] for rank in by_rank), strict=True)]
        for design in DESIGNS
    }
    first, *others = (solver.weights for solver in solvers.values())
    gaps = [float((first - other).abs().max() / first.abs().max()) for other in others]
    difference = max(map(max, group.all_gather_object(gaps)))
    slowest = Layers(*map(_slowest, zip(*group.all_gather_object(tuple(layers)), strict=True)))
    return LadderResult(slowest, step_s, difference)


def _slowest(times: Sequence[Any]) -> Any:
    """Return the maximum over ranks, per layer for lists."""
    if isinstance(times[0], float):
        return max(times)
    return [max(each) for each in zip(*times, strict=True)]


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(each) for each in zip(*rows, strict=True)]


def main() -> None:
    """Measure as one rank; rank 0 writes the results."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}")
    add_options(parser)
    parser.add_argument("--backend", default="auto", help="gloo, nccl")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    world = start_world(device="cpu", backend=args.backend, timeout_s=120.0)
    with collective_errors(world, "training"):
        widths = [args.width] * (args.layers + 1)
        found = measured(world, widths, 1e-3 * args.compute_ms, args.steps)
    if world.rank == 0:
        args.out.write_text(json.dumps(found._asdict()))


# The command.


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of both the ranks and the command."""
    add = parser.add_argument
    add("--layers", type=int, default=8)
    add("--width", type=int, default=1536, help="of a layer with width^2 parameters")
    add("--compute-ms", type=float, default=8.0, help="of a forward; a backward takes twice that")
    add("--steps", type=int, default=9, help="of each design, after one more")


def add_command_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_options(parser)
    parser.add_argument("--ranks", type=int, default=2)


def run(args: argparse.Namespace) -> None:
    """Measure the designs, simulate them with the times of the parts alone, and print both."""
    words = [
        f"--layers={args.layers}",
        f"--width={args.width}",
        f"--compute-ms={args.compute_ms}",
        f"--steps={args.steps}",
    ]
    found = LadderResult.of(run_ranks(_MODULE, args.ranks, words))
    text = report(found, args.ranks)
    print(text)


def report(found: LadderResult, ranks: int) -> str:
    """Return both tables in Markdown."""
    rows = []
    for design in DESIGNS:
        took_s = sorted(found.step_s[design])
        median_s, played_s = statistics.median(took_s), simulated(found.layers, design).makespan
        low, high = (took_s[len(took_s) // 4], took_s[-1 - len(took_s) // 4])
        rows.append(
            [
                design,
                f"{1e3 * played_s:.1f}",
                f"{1e3 * median_s:.1f}",
                f"{1e3 * low:.1f}-{1e3 * high:.1f}",
                f"{100 * (played_s / median_s - 1):+.0f} %",
            ]
        )
    agree = "the same to the last bit"
    if found.difference:  # a backend may sum one buffer in another order than its parts
        agree = f"the same to {found.difference:.1e} of the largest"
    return "\n".join(
        [
            f"S-Caffe's ladder on {ranks} ranks; weights of the three designs are {agree}.\n",
            markdown(["design", "simulated ms", "measured ms", "quartiles", "error"], rows),
            "\nSimulated only: ResNet-152 on 32 ranks, 8 per host, 5 us and 10 GB/s; "
            "broadcast by a k-nomial tree, ms of a step\n",
            markdown(["reduction", *DESIGNS], _resnet152_rows()),
        ]
    )


# The published trace of ResNet-152 on an A100: forward 119 ms, ten parts of the backward, and the
# elements of the gradients of each (spcl/DNN-cpp-proxies), in the order of the backward.
_FORWARD_S: Final = 0.119
_BACKWARD_S: Final = 0.0238
_GRADIENTS: Final = (
    *(6511592, 6567936, 5905920, 6113280, 6176256, 6112768, 6176256, 6112768, 5321216, 5194816),
)


def resnet152(reduction: str, link: Link, ranks: int, group: int) -> Layers:
    """Return the layers of ResNet-152, reduced by an algorithm of `FORMS`, first layer first."""
    sizes = [4 * count for count in reversed(_GRADIENTS)]

    def taken(collective: str, algorithm: str, size: int) -> float:
        return predicted(collective, algorithm, link, ranks, size, group).seconds

    n, total = len(sizes), sum(sizes)
    return Layers(
        [_FORWARD_S / n] * n,
        [_BACKWARD_S] * n,
        [taken("broadcast", "knomial", size) for size in sizes],
        [taken("reduce", reduction, size) for size in sizes],
        taken("broadcast", "knomial", total),
        taken("reduce", reduction, total),
    )


def _resnet152_rows() -> list[list[str]]:
    rows = []
    for reduction in FORMS["reduce"]:
        layers = resnet152(reduction, Link(5e-6, 1e-10), 32, 8)
        times = [f"{1e3 * simulated(layers, design).makespan:.1f}" for design in DESIGNS]
        rows.append([reduction, *times])
    return rows


if __name__ == "__main__":
    main()
