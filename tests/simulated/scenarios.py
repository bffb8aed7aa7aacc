"""Small trainings that together use every stream, event and lent memory of the package."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_hpc import LayerSpec, Pipeline, add_loss, add_metric, run_on_threads
from gpipe_hpc.optim.optimizer import build_optimizer
from gpipe_hpc.schedule import schedule_names
from gpipe_hpc.settings import LAMBConfig, LARSConfig, OptimizerConfig, RMSPropConfig, SGDConfig
from tests.simulated.device import Site
from tests.simulated.lanes import open_transport
from tests.simulated.mpi import open_mpi_transport, reduce_all
from tests.simulated.owners import oss_between_threads, show_groups
from tests.simulated.tracker import HostWait
from tests.simulated.world import SimulatedRank, between, run_simulated
from tests.support import batch, batches

WIDTH, NUM_STEPS = 4, 3


class Block(nn.Module):
    """A layer to recompute, with a matrix, random numbers and a residual."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.linear(x)))


class Normed(nn.Module):
    """BatchNorm, an in-place operation, and a skip."""

    def __init__(self, *, stashes: bool = False, pops: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH * (1 + pops), WIDTH)
        self.norm, self.act, self.stashes = nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), stashes

    def forward(self, x: Tensor, *popped: Tensor) -> Any:
        y = self.act(self.norm(self.linear(torch.cat([x, *popped], 1)))) + x
        return (y, y * 2) if self.stashes else y


class Nest(nn.Module):
    """A boundary of several dtypes, a number and a host tensor."""

    def __init__(self, *, opens: bool) -> None:
        super().__init__()
        self.linear, self.opens = nn.Linear(WIDTH, WIDTH), opens

    def forward(self, given: Any) -> Any:
        if self.opens:
            x = self.linear(given)
            return {"x": x, "signs": (x > 0).to(torch.int16), "host": torch.ones(2), "n": len(x)}
        assert given["n"] == len(given["x"]) and given["host"].sum() == 2
        return self.linear(given["x"]) * given["signs"]


class Reporting(Block):
    """A layer with its own loss and metric, and frozen parameters."""

    def __init__(self, *, freezes: bool) -> None:
        super().__init__()
        self.linear.weight.requires_grad_(not freezes)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        add_loss("size", 0.01 * y.square().sum())
        add_metric("peak", y.detach().abs().sum(), y.numel())
        return y


class Counting(Block):
    """A running mean, a counter, and a buffer that is replaced by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("num_rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.detach().mean(0), 0.5)
                self.num_rows += len(x)
                self.last = x.detach().sum(0)
        return super().forward(x - self.mean)


class Aside(Counting):
    """A counter on the host from the first forward on, and one that stays on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_positive", torch.zeros((), dtype=torch.int64))
        self.is_aside = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_aside:
            self.is_aside = True  # what moves a layer to its device would take it along
            self.num_rows = torch.zeros((), dtype=torch.int64)
        if self.training:
            self.num_positive += (x.detach() > 0).sum()
        return super().forward(x)


class Low(nn.Linear):
    """16-bit weights, for which the optimizer keeps float32 masters."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Overflowing(nn.Linear):
    """A layer with one non-finite gradient in the second step."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.num_seen = 0
        self.weight.register_hook(self.spike)

    def spike(self, gradient: Tensor) -> Tensor:
        self.num_seen += 1
        return gradient * (float("inf") if self.num_seen == 5 else 1.0)


def blocks() -> list[Any]:
    return [LayerSpec(Block) for _ in range(8)]


def normed() -> list[Any]:
    first = LayerSpec(Normed, stashes=True).stashing("a")
    between_them = [LayerSpec(Normed) for _ in range(6)]
    return [first, *between_them, LayerSpec(Normed, pops=True).popping("a")]


def nests() -> list[Any]:
    return [LayerSpec(Nest, opens=place % 2 == 0) for place in range(8)]


def overflowing() -> list[Any]:
    return [LayerSpec(Block) for _ in range(7)] + [LayerSpec(Overflowing)]


def tied() -> list[Any]:
    return [
        LayerSpec(nn.Linear, WIDTH, WIDTH).tied({"weight": "shared"}),
        *(LayerSpec(Block) for _ in range(6)),
        LayerSpec(nn.Linear, WIDTH, WIDTH).tied({"weight": "shared"}),
    ]


def reporting() -> list[Any]:
    return [LayerSpec(Reporting, freezes=place % 2 == 1) for place in range(8)]


def counting() -> list[Any]:
    return [LayerSpec(Counting) for _ in range(4)]


def aside() -> list[Any]:
    return [LayerSpec(Aside) for _ in range(4)]


def in_16_bits() -> list[Any]:
    return [LayerSpec(Low, WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(8)]


def square_sum(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return (output - target).square().sum(), float(len(target))


@dataclass(frozen=True)
class Scenario:
    """A training; `way` is the transport of boundaries, None for shared memory of threads."""

    name: str
    ranks: int = 2
    layers: Callable[[], Sequence[Any]] = blocks
    options: Mapping[str, Any] = field(default_factory=dict)
    way: str | None = None
    sizes: tuple[int, ...] = (16,) * NUM_STEPS
    optimizer: OptimizerConfig | None = None  # None: torch's AdamW
    # What is done in place of a training.
    instead: Callable[[Any], list[Tensor]] | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def has_owners(self) -> bool:
        """Return whether replicas own whole tensors, by fairscale's OSS."""
        outer: Mapping[str, Any] = self.options.get("outer", {})
        return outer.get("shard") == "oss"

    def between_threads(self) -> AbstractContextManager[None]:
        """Return contexts that let threads do what otherwise needs processes."""
        return oss_between_threads() if self.has_owners else nullcontext()


@dataclass
class Given:
    """Results of a rank; `waits` lists waits of its host within each step and each clipping."""

    losses: list[float] = field(default_factory=list)
    tensors: list[dict[str, Tensor]] = field(default_factory=list)
    waits: list[tuple[list[HostWait], list[HostWait]]] = field(default_factory=list)

    def unlike(self, other: "Given") -> list[str]:
        """Return the names of results that are not bitwise equal."""
        losses = zip(self.losses, other.losses, strict=True)
        found = [f"loss {at}: {one} {two}" for at, (one, two) in enumerate(losses) if one != two]
        for at, (ours, theirs) in enumerate(zip(self.tensors, other.tensors, strict=True)):
            if ours.keys() != theirs.keys():
                found.append(f"names {at}: {sorted(ours.keys() ^ theirs.keys())}")
            names = [name for name in ours if name in theirs]
            found += [
                f"{name} {at}: {ours[name]} {theirs[name]}"
                for name in names
                if not _same(ours[name], theirs[name])
            ]
        return found


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and torch.equal(left.to_dense(), right.to_dense())


def optimizer_of(scenario: Scenario, parameters: Sequence[Any]) -> torch.optim.Optimizer:
    if scenario.optimizer is None:
        return torch.optim.AdamW(list(parameters) or [{"params": []}], lr=0.01)
    named = [(str(place), parameter) for place, parameter in enumerate(parameters)]
    return build_optimizer(named, scenario.optimizer)


def pipe_of(scenario: Scenario, world: Any) -> Pipeline:
    """Return a rank's pipeline of a scenario."""
    return Pipeline(
        scenario.layers(),
        square_sum,
        world=world,
        seed=5,
        partition="uniform",
        **{"microbatches": 4, **scenario.options},
    )


def train(scenario: Scenario, world: Any) -> Given:
    """Train on one rank, clip, evaluate and predict."""
    if scenario.instead is not None:
        tensors = scenario.instead(world)
        return Given(tensors=[{str(at): each for at, each in enumerate(tensors)}])
    if scenario.way is not None and world.device.is_accelerator:
        world.transport = partial(WAYS_TO_OPEN[scenario.way], world)
    if scenario.has_owners:
        show_groups(world)
    pipe = pipe_of(scenario, world)
    given, optimizer = Given(), pipe.optimizer(partial(optimizer_of, scenario))
    data = [batches(1, n, WIDTH, seed=n, dtype=torch.float32)[0] for n in scenario.sizes]
    for inputs, targets in data:
        part = pipe.share(len(inputs))
        step = partial(pipe.step, inputs[part], targets[part])
        result, in_step = watched(world, step)
        norm, in_clipping = watched(world, partial(pipe.clip_grad_norm_, 0.5))
        given.waits.append((in_step, in_clipping))
        given.losses += [result.loss, *result.microbatch_losses]
        held = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
        given.tensors.append({**held, "norm": norm.clone()})
        optimizer.step()
        if pipe.uses_local_sgd:
            pipe.outer_step()
    inputs, targets = data[0]
    part = pipe.share(len(inputs))
    assert pipe.timeline().makespan > 0  # of marks, which are read
    given.losses.append(pipe.evaluate(inputs[part], targets[part]).loss)
    end = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
    given.tensors.append({**end, "predicted": pipe.predict(inputs[part]).clone()})
    return given


def watched(world: Any, call: Callable[[], Any]) -> tuple[Any, list[HostWait]]:
    return between(world.device, call) if world.device.is_accelerator else (call(), [])


def played(scenario: Scenario, ignores: frozenset[Site] = frozenset()) -> SimulatedRank:
    """Train on simulated devices."""
    with scenario.between_threads():
        return run_simulated(
            scenario.ranks, lambda world: train(scenario, world), ignores=ignores, timeout_s=30.0
        )


def read_shards(world: Any) -> list[Tensor]:
    """Read gathered shards after a step before any computation uses them, and run another step."""
    pipe = Pipeline(
        blocks(), square_sum, world=world, seed=5, replicas=2, microbatches=2, outer=FLAT
    )
    optimizer = pipe.optimizer(lambda own: torch.optim.AdamW(own, lr=0.01))
    inputs, targets = batches(1, 16, WIDTH, dtype=torch.float32)[0]
    part = pipe.share(len(inputs))
    pipe.step(inputs[part], targets[part])
    found = [each.clone() for each in pipe.gradients().values() if each is not None]
    optimizer.step()
    optimizer.step()
    pipe.await_parameters()
    return found + [parameter.detach().clone() for parameter in pipe.parameters()]


def on_cpu(scenario: Scenario) -> list[Given]:
    """Train on the CPU."""
    with scenario.between_threads():
        return run_on_threads(scenario.ranks, lambda world: train(scenario, world))


def of(name: str, ranks: int = 2, **rest: Any) -> Scenario:
    """Return a scenario; keywords that are not its fields are options of `Pipeline`."""
    fields = ("layers", "way", "sizes", "instead", "optimizer")
    named = {key: rest.pop(key) for key in fields if key in rest}
    return Scenario(name, ranks, options=rest, **named)


SCHEDULES = [name for name in schedule_names() if name not in ("file", "auto")]
RECOMPUTE = ("always", "except_last", "never")
EACH_SCHEDULE = [
    of(name, schedule=name, recompute=RECOMPUTE[place % 3], offload=place % 2 == 1)
    for place, name in enumerate(SCHEDULES)
]
FLAT = {"shard": "flat", "bucket_bytes": 200}
TWO_FLAT = {"outer": FLAT, "replicas": 2}
OUTER: dict[str, dict[str, Any]] = {
    "sums": {"bucket_bytes": 200},
    "no overlap": {"overlap": False},
    "in rank order": {"order": "rank"},
    "by hosts": {"hierarchy": 1},
    "by one host": {"hierarchy": "host"},
    "by weights": {"weights": (3, 1)},
    "flat shards": FLAT,
    "flat shards in rank order": {"shard": "flat", "order": "rank"},
    "shards of owners": {"shard": "oss"},
    **{
        f"{name}": {"compress": name}
        for name in ("bfloat16", "float16", "powersgd", "topk", "qsgd")
    },
    "apart": {"every": 2, "momentum": 0.5, "nesterov": True},
    "apart in parts": {"every": 2, "parts": 2, "behind": 1, "bucket_bytes": 200},
    "apart and compressed": {"every": 2, "compress": "topk"},
}
EACH_OUTER = [
    of(name, 4, replicas=2, outer=outer, schedule=("one_f_one_b", "zb_v")[place % 2])
    for place, (name, outer) in enumerate(OUTER.items())
]
# Of four layers of the first stage, this leaves room for what two keep.
BUDGET = {"recompute": "budget", "memory_bytes": 2200, "optimizer_states": 0}
KINDS = [
    of("bfloat16", precision="bfloat16", schedule="one_f_one_b"),
    of("float16 with an overflow", layers=overflowing, precision="float16", offload=True),
    of("float16 of replicas", 4, layers=overflowing, precision="float16", replicas=2),
    of("normed", layers=normed, recompute="never", offload=True),
    of("normed over replicas", 4, layers=normed, replicas=2, normalise_over_replicas=True),
    of("buffers of the first", 4, layers=normed, replicas=2, buffers="first"),
    of("mirrored", 4, layers=normed, schedule="chimera", replicas=2, offload=True),
    of("nests", layers=nests, recompute="never"),
    of("nests offloaded", layers=nests, recompute="always", offload=True, schedule="zb_v"),
    of("uneven", sizes=(16, 3, 11), schedule="one_f_one_b"),
    of("parts of gradients", 4, replicas=2, noise_over="microbatches"),
    of("noise over replicas", 2, replicas=2, noise_over="replicas", optimizer=SGDConfig()),
    of("tied", layers=tied, schedule="one_f_one_b", optimizer=LAMBConfig()),
    of("tied in float16", layers=tied, precision="float16"),
    of("reporting", layers=reporting, offload=True, optimizer=LARSConfig()),
    of("mirrored flat shards", 2, schedule="chimera", outer=FLAT, optimizer=RMSPropConfig()),
    of("in 16 bits", 2, layers=in_16_bits, replicas=2, microbatches=3, optimizer=LAMBConfig()),
    of("flat shards at once", 2, replicas=2, outer={**FLAT, "overlap": False}),
    of("one rank", 1, offload=True, recompute="never"),
    of("holes", 3, stages=2, schedule="zb_h1", microbatches=4),
    of("holes and slow ranks", 5, stages=2, schedule="one_f_one_b", paces=[1, 1, 2, 1, 1]),
    of("flat shards in float16", 2, layers=overflowing, precision="float16", **TWO_FLAT),
    of("buffers of each", 4, layers=normed, replicas=2, buffers="each"),
    of("own buffers", 4, layers=counting, replicas=2, schedule="one_f_one_b", recompute="always"),
    of(
        "own buffers of the first", 2, layers=counting, replicas=2, buffers="first", sizes=(15,) * 3
    ),
    of("own buffers on both sides", 2, layers=aside, replicas=2, sizes=(15,) * 3),
    of("own buffers mirrored", 2, layers=counting, schedule="chimera", sizes=(15,) * 3),
    of("own buffers in holes", 3, layers=counting, stages=2, schedule="zb_h1", microbatches=4),
    of("within a budget", **BUDGET, example=batch(4, width=WIDTH), schedule="one_f_one_b"),
    of("compiled", compile="eager", recompute="always", schedule="one_f_one_b"),
]
WAYS_TO_OPEN: dict[str, Callable[..., Any]] = {
    "staged": partial(open_transport, way="staged"),
    "direct": partial(open_transport, way="direct"),
    "mpi": partial(open_mpi_transport, takes_device_pointers=False),
    "mpi pointers": partial(open_mpi_transport, takes_device_pointers=True),
}
WAYS = [
    of(f"{way} {name}", ranks, way=way, **options)
    for way in WAYS_TO_OPEN
    for name, ranks, options in (
        ("blocks", 2, {"schedule": "interleaved", "recompute": "always"}),
        ("split", 2, {"schedule": "zb_v", "offload": True}),
        ("nests", 2, {"layers": nests, "schedule": "one_f_one_b"}),
        ("skips", 4, {"layers": normed, "schedule": "gpipe"}),
        ("uneven", 2, {"sizes": (16, 3, 11, 16), "schedule": "hanayo"}),
    )
]
BESIDE = [
    of("mpi sums", 4, instead=reduce_all, way="mpi"),
    of("shards that are read", 2, instead=read_shards),
]
ALL = [*EACH_SCHEDULE, *EACH_OUTER, *KINDS, *WAYS, *BESIDE]
