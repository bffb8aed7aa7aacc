"""Helpers for tests in several folders: losses, batches, layers, and results of runs."""

import contextlib
import copy
import itertools
import json
import math
import os
import random
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.errors import GpipeError
from gpipe_hpc.schedule import Costs, Timeline, build, simulate
from gpipe_hpc.settings import settings_of

Batch = tuple[Tensor, Tensor]
Named = dict[str, Tensor]

PAUSING_MODEL = """
import time

from torch import nn

from gpipe_hpc.models import build_gpt


class Pause(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, inputs):
        time.sleep(self.seconds)
        return inputs


def build(pause_s=0.0, **own):
    keywords = {"vocab_size": 256, "block_size": 16, "num_heads": 4, "dropout": 0.1, **own}
    return [*build_gpt(**keywords), Pause(pause_s)]
"""
"""A user model with a pause, so that few steps run while processes start."""


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of a micro-batch."""
    return (output - target).square().mean()


def square_sum(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """Return the sum of squared errors of a micro-batch and its number of samples."""
    return (output - target).square().sum(), float(len(target))


def class_sum(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy and the number of targets other than -100."""
    return F.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum()


def batches(
    num_steps: int,
    size: int = 8,
    width: int = 4,
    target_width: int | None = None,
    *,
    seed: int = 3,
    dtype: torch.dtype = torch.float64,
) -> list[Batch]:
    """Return normally distributed inputs and targets for each step."""
    generator = torch.Generator().manual_seed(seed)

    def draw(columns: int) -> Tensor:
        return torch.randn(size, columns, generator=generator, dtype=dtype)

    return [(draw(width), draw(target_width or width)) for _ in range(num_steps)]


def batch(
    size: int = 8, seed: int = 1, width: int = 4, dtype: torch.dtype = torch.float32
) -> Batch:
    """Return the inputs and targets of one step."""
    return batches(1, size, width, seed=seed, dtype=dtype)[0]


def token_batch(seed: int = 0, size: int = 8, length: int = 8, vocabulary: int = 13) -> Batch:
    """Return random tokens and the same tokens shifted by one, each of shape [size, length]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (size, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def linears(number: int, width: int = 4) -> list[LayerSpec]:
    """Return specs of `number` linear layers of equal width."""
    return [LayerSpec(nn.Linear, width, width) for _ in range(number)]


def gradients_of(pipe: Pipeline) -> Named:
    """Return copies of this rank's gradients, by global name."""
    return {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}


def buffers_of(pipe: Pipeline) -> Named:
    """Return this rank's buffers, by global name."""
    return {n: b for stage in pipe.stages.values() for n, b in stage.named_buffers().items()}


@dataclass
class Trained:
    """Results of a training run: losses and gradients of each step, and final buffers."""

    losses: list[float] = field(default_factory=list)
    gradients: list[Named] = field(default_factory=list)
    buffers: Named = field(default_factory=dict)


def descend(parameters: Iterable[nn.Parameter], rate: float) -> None:
    """Take one step of plain gradient descent."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter -= rate * parameter.grad


def train_rank(pipe: Pipeline, data: Iterable[Batch], rate: float = 0.0) -> Trained:
    """Train this rank on its part of each batch; return losses, gradients and buffers."""
    found = Trained()
    for inputs, targets in data:
        part = pipe.share(len(inputs))
        found.losses.append(pipe.step(inputs[part], targets[part]).loss)
        found.gradients.append(gradients_of(pipe))
        descend(pipe.parameters(), rate)
    found.buffers = buffers_of(pipe)
    return found


def train_ranks(
    layers: Sequence[Any],
    loss_fn: Callable[..., Any],
    data: Sequence[Batch],
    *,
    ranks: int,
    rate: float = 0.0,
    **options: Any,
) -> list[Trained]:
    """Train copies of the layers on ranks that are threads; return the results of each rank."""

    def body(world: Any) -> Trained:
        pipe = Pipeline(copy.deepcopy(layers), loss_fn, world=world, **options)
        return train_rank(pipe, data, rate)

    return run_on_threads(ranks, body)


def train_plainly(
    layers: Sequence[nn.Module],
    loss_fn: Callable[..., Tensor],
    data: Iterable[Batch],
    microbatches: int = 4,
    rate: float = 0.0,
) -> Trained:
    """Train a copy of the layers as an nn.Sequential, one micro-batch after the other."""
    found, model = Trained(), nn.Sequential(*copy.deepcopy(list(layers)))
    for inputs, targets in data:
        model.zero_grad()
        loss = 0.0
        for x, y in zip(
            inputs.tensor_split(microbatches), targets.tensor_split(microbatches), strict=True
        ):
            part = loss_fn(model(x), y) * len(x) / len(inputs)
            part.backward()
            loss += float(part.detach())
        own = {f"layers.{name}": p for name, p in model.named_parameters()}
        found.losses.append(loss)
        found.gradients.append({n: p.grad.clone() for n, p in own.items() if p.grad is not None})
        descend(own.values(), rate)
    return found


def together(ranks: Sequence[Trained]) -> Trained:
    """Merge the results of all ranks; losses are those of rank 0."""
    steps = zip(*(each.gradients for each in ranks), strict=True)
    return Trained(
        ranks[0].losses,
        [joined(step) for step in steps],
        joined([each.buffers for each in ranks]),
    )


def joined(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the named tensors of all ranks; tensors on several ranks must be bitwise equal."""
    found: dict[str, Any] = {}
    for named in ranks:
        for name, tensor in named.items():
            first = found.setdefault(name, tensor)
            assert same_bits(first, tensor), f"ranks hold different {name}"
    return found


def same_bits(one: Any, other: Any) -> bool:
    """Return whether two tensors have equal dtype, layout and values; NaN equals NaN."""
    if one is None or other is None:
        return one is other
    if one.layout != other.layout or one.dtype != other.dtype or one.shape != other.shape:
        return False
    left, right = one.to_dense(), other.to_dense()
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def assert_close(ours: Trained, other: Trained, near: float) -> None:
    """Assert that losses, gradients and buffers agree within the tolerance `near`."""
    assert len(ours.losses) == len(other.losses)
    for mine, theirs in zip(ours.losses, other.losses, strict=True):
        assert abs(mine - theirs) <= near * abs(theirs), (ours.losses, other.losses)
    for mine, theirs in [
        *zip(ours.gradients, other.gradients, strict=True),
        (ours.buffers, other.buffers),
    ]:
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            other_dense = theirs[name].to_dense()
            assert torch.allclose(tensor.to_dense(), other_dense, rtol=near, atol=near), name


RUN_COSTS = Costs(
    forward=[1, 2, 1, 3], input_gradient=2, weight_gradient=[1, 1, 2, 1], recompute=1, send=0.5
)


def measured_run(
    name: str, costs: Costs = RUN_COSTS, recompute: str = "never", start_s: float = 100.0
) -> Timeline:
    """Return a simulated timeline in the form of a measured one: it contains only compute actions.

    Times start at `start_s` instead of 0.
    """
    timeline = simulate(build(name, ranks=4, microbatches=6, recompute=recompute), costs)
    rows = tuple(
        tuple(
            event._replace(start_s=event.start_s + start_s, end_s=event.end_s + start_s)
            for event in row
        )
        for row in timeline.events
    )
    return Timeline(rows, timeline.num_stages, timeline.num_microbatches, name)


def train_here(ranks: int, *overrides: str) -> None:
    """Run the train command with the ranks as threads of this process; assert that it succeeds."""
    # Imported here, since tests of exactness also run without Hydra.
    from gpipe_hpc.config import check_config, compose_config
    from gpipe_hpc.trainer.loop import run_training
    from gpipe_hpc.trainer.signals import StopRequest

    config = compose_config(overrides)
    check_config(config, ranks)
    codes = run_on_threads(ranks, lambda world: run_training(config, world, StopRequest()))
    assert codes == [0] * ranks


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl as dictionaries."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    """Return the training loss of each line of metrics.jsonl that has one."""
    return [line["loss"] for line in metrics(run) if "loss" in line]


def has_begun(run: Path, num_lines: int = 3) -> bool:
    """Return whether a run has written more than `num_lines` lines of metrics."""
    path = run / "metrics.jsonl"
    return path.exists() and len(path.read_text().splitlines()) > num_lines


def largest(differences: Iterable[float]) -> float:
    """Return the maximum, or infinity if a value is NaN, since `max` may ignore NaN."""
    return max((math.inf if math.isnan(each) else each for each in differences), default=0.0)


def patience() -> float:
    """Return the factor by which time limits are extended on a busy machine.

    The factor is the number of runnable processes per CPU, at least 1. Limits in seconds are chosen
    for an idle machine.
    """
    average, _, _, running, _ = Path("/proc/loadavg").read_text().split()
    wanted = max(float(average), int(running.partition("/")[0]))
    return max(1.0, wanted / len(os.sched_getaffinity(0)))


def free_port() -> int:
    """Return a free port outside of the range of ephemeral ports.

    No outgoing connection of another process can therefore take the port before it is used.
    """
    dealt = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    while True:
        port = random.SystemRandom().randrange(15_000, int(dealt[0]))
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def refusal(check: Callable[..., object], *given: Any) -> str | None:
    """Return the message of the GpipeError that a check raises, or None if it passes."""
    try:
        check(*given)
    except GpipeError as error:
        return str(error)
    return None


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def covering(*axes: Sequence[Any], strength: int = 2) -> list[tuple[Any, ...]]:
    """Return a small set of combinations that contains all combinations of any `strength` axes.

    Most faults depend on two settings, few on three; a set that covers all pairs is a tenth of the
    whole product. The search is greedy and deterministic.
    """

    def meetings(values: tuple[Any, ...]) -> set[tuple[tuple[int, int], ...]]:
        places = [(axis, axes[axis].index(value)) for axis, value in enumerate(values)]
        return set(itertools.combinations(places, min(strength, len(axes))))

    product = {values: meetings(values) for values in itertools.product(*axes)}
    missing = set().union(*product.values())
    chosen = []
    while missing:
        best = max(product, key=lambda values: len(product[values] & missing))
        chosen.append(best)
        missing -= product.pop(best)
    return chosen


def product(*values: Any) -> Any:
    """Return a parameter set marked `product`, which only the longer test runs include."""
    return pytest.param(*values, marks=pytest.mark.product)


def product_of(names: str, *axes: Sequence[Any], strength: int = 2) -> pytest.MarkDecorator:
    """Parametrize by all combinations; those outside of a `covering` set are marked `product`."""
    fast = covering(*axes, strength=strength)
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(*values, marks=[] if values in fast else pytest.mark.product)
            for values in itertools.product(*axes)
        ],
    )


def cover_of(names: str, *axes: Sequence[Any], strength: int = 2) -> pytest.MarkDecorator:
    """Parametrize by a `covering` set of all combinations."""
    return pytest.mark.parametrize(names, covering(*axes, strength=strength))


def in_turn(
    names: str, kinds: Sequence[Any], others: Sequence[Any], *, each: int, more: int = 0
) -> pytest.MarkDecorator:
    """Parametrize each kind by `each` of the others in rotation; `more` are marked `product`."""
    step = max(1, len(others) // (each + more))
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(
                kind,
                others[(place + step * turn) % len(others)],
                marks=[] if turn < each else pytest.mark.product,
            )
            for place, kind in enumerate(kinds)
            for turn in range(each + more)
        ],
    )


@contextlib.contextmanager
def mute(address: str = "127.0.0.1") -> Iterator[tuple[str, int]]:
    """Yield the address of a listener that ignores connections, as its accept queue is full."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind((address, 0))
        listener.listen(0)
        for _ in range(3):
            call = stack.enter_context(socket.socket())
            call.setblocking(False)
            call.connect_ex(listener.getsockname())
        time.sleep(0.05)
        yield listener.getsockname()


def choices_of(schema, name):
    """Return the allowed names of a setting."""
    (found,) = (each for each in settings_of(schema) if each.name == name)
    return found.choices.names
