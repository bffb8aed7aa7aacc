"""Latency and bandwidth between two processes over sizes, as osu_latency and osu_bw draw them.

Paths: `direct`, the backend sends from the tensor's own memory (Gloo from the CPU's, NCCL from a
GPU's); `staged`, the tensor goes whole through a buffer of the host at both ends, as a device's
does if MPI takes no device pointers; `staged in blocks`, the same with two buffers that take turns,
so that a block is copied while another is sent (MVAPICH2-GPU, Wang et al., 2011); `shared memory`,
the pipeline's own transport between processes of one host.
"""

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist

from experiments.outer.collectives.costs import Link, Terms
from experiments.outer.collectives.figures import markdown, quartiles, size_text
from experiments.outer.collectives.fitting import Fit, Sample, fit
from experiments.outer.collectives.lists import numbers
from experiments.outer.collectives.picture import COLOURS, MARKERS, new_figure, save, settings
from experiments.outer.collectives.plot import logarithmic
from experiments.outer.collectives.running import run_ranks
from gpipe_hpc.comm.transport.base import PlacedChannel, Transport
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.comm.world.world import World, collective_errors
from gpipe_hpc.schedule import Channel

SIZES: Final = tuple(4**power for power in range(12))
BLOCK_BYTES: Final = 512 * 1024
BLOCKS: Final = tuple(16 * 1024 * 4**power for power in range(6))
_MODULE: Final = "experiments.outer.collectives.point_to_point"
_CASE_BYTES: Final = 16 * 1024**2  # that a case sends about, so that each takes some milliseconds
_WINDOW: Final = 64  # messages under way at once, as osu_bw has them
_WINDOW_BYTES: Final = 16 * 1024**2
_ACK_BYTES: Final = 4

Wait = Callable[[], object]


class Way(Protocol):
    """A way from one process to the other."""

    def start_send(self, tensor: torch.Tensor) -> Wait:
        """Start sending; what is returned waits until the tensor may be changed."""

    def start_receive(self, tensor: torch.Tensor) -> Wait:
        """Start receiving; what is returned waits until the tensor is there."""


class Direct:
    """The backend takes the tensor where it is."""

    def __init__(self, world: World) -> None:
        self._world, self._other = world, 1 - world.rank
        self._group = world.group([(0, 1)]).torch_group

    def start_send(self, tensor: torch.Tensor) -> Wait:
        """Send from the tensor's memory."""
        return self._finish(dist.isend(tensor, self._other, group=self._group))

    def start_receive(self, tensor: torch.Tensor) -> Wait:
        """Receive into the tensor's memory."""
        return self._finish(dist.irecv(tensor, self._other, group=self._group))

    def _finish(self, work: dist.Work | None) -> Wait:
        assert work is not None, "both ranks are members"

        def wait() -> None:
            work.wait()
            self._world.device.synchronize()

        return wait


class _Incoming:
    """A block that is to be received, and the buffer and the work once it is posted."""

    def __init__(self, block: torch.Tensor) -> None:
        self.block, self.buffer = block, block
        self.work: dist.Work | None = None


class Staged:
    """The tensor goes through buffers of the host, `block_bytes` at a time; None: whole."""

    def __init__(self, world: World, block_bytes: int | None) -> None:
        self._world, self._other = world, 1 - world.rank
        self._group = dist.new_group([0, 1], backend="gloo")
        self._block_bytes = block_bytes
        self._is_pinned = world.device.is_accelerator
        self._free: dict[int, list[torch.Tensor]] = {}
        self._unposted: deque[_Incoming] = deque()

    def start_send(self, tensor: torch.Tensor) -> Wait:
        """Copy a block while the one before is sent."""
        under_way: list[tuple[dist.Work | None, torch.Tensor]] = []
        for block in self._blocks(tensor):
            if len(under_way) == 2:
                self._end(under_way.pop(0))
            buffer = self._take(len(block))
            buffer.copy_(block)
            under_way.append((dist.isend(buffer, self._other, group=self._group), buffer))

        def wait() -> None:
            for each in under_way:
                self._end(each)

        return wait

    def start_receive(self, tensor: torch.Tensor) -> Wait:
        """Copy a block while the next one arrives; messages are waited for in their order.

        A block is posted once all blocks before it are, those of earlier messages among them.
        """
        own = [_Incoming(block) for block in self._blocks(tensor)]
        self._unposted.extend(own)
        if len(self._unposted) == len(own):
            self._post(min(2, len(own)))

        def wait() -> None:
            for incoming in own:
                while incoming.work is None:
                    self._post(1)
                incoming.work.wait()
                incoming.block.copy_(incoming.buffer)
                self._give_back(incoming.buffer)
                self._post(min(1, len(self._unposted)))
            self._world.device.synchronize()

        return wait

    def _post(self, number: int) -> None:
        for _ in range(number):
            incoming = self._unposted.popleft()
            incoming.buffer = self._take(len(incoming.block))
            incoming.work = dist.irecv(incoming.buffer, self._other, group=self._group)

    def _blocks(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(tensor, self._block_bytes or len(tensor))

    def _end(self, each: tuple[dist.Work | None, torch.Tensor]) -> None:
        work, buffer = each
        assert work is not None, "both ranks are members"
        work.wait()
        self._give_back(buffer)

    def _give_back(self, buffer: torch.Tensor) -> None:
        self._free.setdefault(len(buffer), []).append(buffer)

    def _take(self, num_bytes: int) -> torch.Tensor:
        """Return a buffer of the host; those that are free are used again."""
        free = self._free.setdefault(num_bytes, [])
        if free:
            return free.pop()
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)


class SharedMemory:
    """The transport that the pipeline's boundaries take between processes of one host."""

    def __init__(self, world: World) -> None:
        to, back = (
            PlacedChannel(Channel(i, 1 - i, 0), source_rank=i, destination_rank=1 - i, tag=0)
            for i in (0, 1)
        )
        self._transport: Transport = world.transport([to, back])
        self._out, self._into = (to, back) if world.rank == 0 else (back, to)
        self._sent = self._received = 0

    def start_send(self, tensor: torch.Tensor) -> Wait:
        """Send; the tensor may be changed once all has left."""
        self._transport.send(self._out, "study", self._sent, tensor, 1)
        self._sent += 1
        return self._transport.finish

    def start_receive(self, tensor: torch.Tensor) -> Wait:
        """Receive; what comes is a tensor of its own, not copied into the one that is given."""
        number, self._received = self._received, self._received + 1

        def wait() -> None:
            self._transport.post(self._into, "study", number)
            self._transport.wait(self._into, "study", number)

        return wait


class Curve(NamedTuple):
    """What a path takes over sizes: a list of repetitions for each."""

    path: str
    sizes: list[int]
    latency_s: list[list[float]]
    bandwidth: list[list[float]]  # bytes a second


class Found(NamedTuple):
    """All curves; and of staging in blocks, seconds of one message over the size of a block."""

    device: str
    curves: list[Curve]
    staged_bytes: int
    blocks: list[int]
    block_s: list[list[float]]

    @classmethod
    def of(cls, read: dict[str, Any]) -> "Found":
        """Return what was read from JSON."""
        return cls(**{**read, "curves": [Curve(*each) for each in read["curves"]]})


# What the two ranks do.


def paths_of(world: World) -> dict[str, Way]:
    """Return the ways between two ranks by name; the same call on both."""
    found: dict[str, Way] = {
        "direct": Direct(world),
        "staged": Staged(world, None),
        "staged in blocks": Staged(world, BLOCK_BYTES),
    }
    if not world.device.is_accelerator:
        found["shared memory"] = SharedMemory(world)
    return found


def measured(world: World, sizes: Sequence[int], repeats: int, staged_bytes: int) -> Found:
    """Time all paths in turn, round after round; the same call on both ranks.

    Times are those of rank 0, which hears of the other's end by its answer.
    """
    paths = paths_of(world)
    longest = max(*sizes, staged_bytes)
    vector = torch.zeros(longest, dtype=torch.uint8, device=world.device.torch)
    curves = {
        name: Curve(name, list(sizes), [[] for _ in sizes], [[] for _ in sizes]) for name in paths
    }
    blocks = [block for block in BLOCKS if block <= staged_bytes]
    by_block = [Staged(world, block) for block in blocks]
    block_s: list[list[float]] = [[] for _ in blocks]
    for turn in range(1 + repeats):
        for name, path in paths.items():
            for at, size in enumerate(sizes):
                latency_s = _latency_s(world, path, vector[:size])
                bandwidth = _bandwidth(world, path, vector[:size])
                if turn:
                    curves[name].latency_s[at].append(latency_s)
                    curves[name].bandwidth[at].append(bandwidth)
        for at, path in enumerate(by_block):
            took_s = _latency_s(world, path, vector[:staged_bytes])
            if turn:
                block_s[at].append(took_s)
    kind = world.device.torch.type
    return Found(kind, list(curves.values()), staged_bytes, blocks, block_s)


def _latency_s(world: World, path: Way, vector: torch.Tensor) -> float:
    """Return half of what a message there and one back take, over some of them."""
    times = max(4, min(100, _CASE_BYTES // len(vector) // 4))
    began_s = time.perf_counter()
    for _ in range(times):
        if world.rank == 0:
            path.start_send(vector)()
            path.start_receive(vector)()
        else:
            path.start_receive(vector)()
            path.start_send(vector)()
    return (time.perf_counter() - began_s) / times / 2


def _bandwidth(world: World, path: Way, vector: torch.Tensor) -> float:
    """Return bytes a second of a window of messages that are all under way, up to the answer."""
    window = max(2, min(_WINDOW, _WINDOW_BYTES // len(vector)))
    answer = torch.zeros(_ACK_BYTES, dtype=torch.uint8, device=vector.device)
    began_s = time.perf_counter()
    if world.rank == 0:
        waits = [path.start_send(vector) for _ in range(window)]
        for wait in waits:
            wait()
        path.start_receive(answer)()
    else:
        waits = [path.start_receive(vector) for _ in range(window)]
        for wait in waits:
            wait()
        path.start_send(answer)()
    return window * len(vector) / (time.perf_counter() - began_s)


def main() -> None:
    """Measure as one of two ranks, and let rank 0 write what was found."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}")
    add_options(parser)
    parser.add_argument("--backend", default="auto", help="gloo, nccl")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    world = start_world(device=args.device, backend=args.backend, timeout_s=120.0)
    with collective_errors(world, "timing messages"):
        assert world.size == 2, f"two ranks are timed, got {world.size}"
        found = measured(world, args.bytes, args.repeats, args.staged_bytes)
    if world.rank == 0:
        args.out.write_text(json.dumps(found._asdict()))


# The command.


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what ranks and the command share."""
    add = parser.add_argument
    add("--bytes", type=numbers(1), default=list(SIZES), metavar="N,...", help="of the messages")
    add("--repeats", type=int, default=7, help="measured rounds, after one more")
    add("--staged-bytes", type=int, default=8 * 1024**2, help="message that is cut into blocks")
    add("--device", default="cpu", help="cpu, or an accelerator as torch calls it")


def add_command_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_options(parser)
    parser.add_argument("--out", type=Path, help="folder for the table and the picture")


def run(args: argparse.Namespace) -> None:
    """Start two ranks; print and keep what they found."""
    words = [
        f"--bytes={','.join(map(str, args.bytes))}",
        f"--repeats={args.repeats}",
        f"--staged-bytes={args.staged_bytes}",
        f"--device={args.device}",
    ]
    backend = "gloo" if args.device == "cpu" else "auto"
    found = Found.of(run_ranks(_MODULE, 2, words, backend=backend))
    text = said(found)
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "point_to_point.md").write_text(text + "\n", encoding="utf-8")
        draw(found, args.out / "point_to_point.svg")


def link_of(curve: Curve) -> Fit:
    """Return alpha and beta of a path: a message of n bytes takes alpha + n beta.

    Of the lower quartiles: what else the machine does adds to times and takes nothing away.
    """
    quiet = (quartiles(took)[0] for took in curve.latency_s)
    return fit(
        [Sample(Terms(1, size), took) for size, took in zip(curve.sizes, quiet, strict=True)]
    )


def pipeline_of(found: Found) -> Fit:
    """Return t and 1/B of staging in blocks: (M/C + 2)(t + C/B), by MVAPICH2-GPU's model.

    Three stages: the copy to the host, the network, the copy from the host. B is the slowest's.
    """
    m = found.staged_bytes
    return fit(
        [
            Sample(_stages(m, block), quartiles(took)[0])
            for block, took in zip(found.blocks, found.block_s, strict=True)
        ]
    )


def _stages(num_bytes: int, block: int) -> Terms:
    block = min(block, num_bytes)
    return Terms(num_bytes / block + 2, num_bytes + 2 * block)


def said(found: Found) -> str:
    """Return the tables and the fitted models."""
    names = [curve.path for curve in found.curves]
    rows: dict[str, list[list[str]]] = {"latency": [], "bandwidth": []}
    for at, size in enumerate(found.curves[0].sizes):
        for kind, rows_of in rows.items():
            cells = [size_text(size)]
            for curve in found.curves:
                values = (curve.latency_s if kind == "latency" else curve.bandwidth)[at]
                factor = 1e6 if kind == "latency" else 1e-6
                cells.append(_with_quartiles([factor * value for value in values]))
            rows_of.append(cells)
    lines = [
        f"Between two processes, tensors on {found.device}: medians, quartiles in brackets.\n",
        "Latency of one message, us\n",
        markdown(["size", *names], rows["latency"]),
        "\nBandwidth of a window of messages, MB/s\n",
        markdown(["size", *names], rows["bandwidth"]),
        "\nFitted to the lower quartiles of the latencies: alpha + n beta\n",
    ]
    for curve in found.curves:
        link, error = link_of(curve)
        lines.append(
            f"- {curve.path}: alpha {1e6 * link.start_s:.3g} us, beta {1e9 * link.byte_s:.3g} ns/B"
            f"{_rate(link)}; half of the sizes are within {100 * error:.0f} %"
        )
    stages, error = pipeline_of(found)
    lines.append(
        f"\nA message of {size_text(found.staged_bytes)} staged in blocks of C bytes; the model "
        f"(M/C + 2)(t + C/B) with t {1e6 * stages.start_s:.3g} us{_rate(stages)} (half within "
        f"{100 * error:.0f} %)\n"
    )
    blocks = [
        [size_text(block), _with_quartiles([1e3 * each for each in took]), f"{1e3 * model_s:.3g}"]
        for block, took in zip(found.blocks, found.block_s, strict=True)
        if (model_s := stages.seconds(_stages(found.staged_bytes, block)))
    ]
    lines.append(markdown(["block", "ms", "model ms"], blocks))
    return "\n".join(lines)


def _rate(link: Link) -> str:
    return f" ({1e-9 / link.byte_s:.3g} GB/s)" if link.byte_s else ""


def _with_quartiles(values: Sequence[float]) -> str:
    low, high = quartiles(values)
    return f"{statistics.median(values):.3g} ({low:.3g}-{high:.3g})"


def draw(found: Found, path: Path) -> None:
    """Draw latency and bandwidth over sizes, and the time of a message over blocks."""
    with settings():
        figure = new_figure(13.0, 4.2)
        latency, bandwidth, staging = figure.subplots(1, 3)
        for number, curve in enumerate(found.curves):
            style: Mapping[str, Any] = {
                "color": COLOURS[number],
                "marker": MARKERS[number],
                "markersize": 4,
                "linewidth": 1.0,
                "label": curve.path,
            }
            took_us = [1e6 * statistics.median(each) for each in curve.latency_s]
            latency.plot(curve.sizes, took_us, **style)
            _band(latency, curve.sizes, curve.latency_s, 1e6, COLOURS[number])
            form = link_of(curve).link
            latency.plot(
                *(curve.sizes, [1e6 * form.seconds(Terms(1, size)) for size in curve.sizes]),
                linestyle="--",
                linewidth=0.7,
                color=COLOURS[number],
            )
            rates = [1e-6 * statistics.median(each) for each in curve.bandwidth]
            bandwidth.plot(curve.sizes, rates, **style)
            _band(bandwidth, curve.sizes, curve.bandwidth, 1e-6, COLOURS[number])
        took_ms = [1e3 * statistics.median(each) for each in found.block_s]
        staging.plot(found.blocks, took_ms, color=COLOURS[2], marker=MARKERS[2], label="measured")
        link = pipeline_of(found).link
        model = [1e3 * link.seconds(_stages(found.staged_bytes, block)) for block in found.blocks]
        staging.plot(found.blocks, model, linestyle="--", color=COLOURS[2], label="model")
        for axes, title, unit in (
            (latency, "latency, as osu_latency", "us (dashed: alpha + n beta)"),
            (bandwidth, "bandwidth, as osu_bw", "MB/s"),
            (staging, f"{size_text(found.staged_bytes)} staged in blocks", "ms"),
        ):
            logarithmic(axes)
            axes.set_title(title)
            axes.set_ylabel(unit)
            axes.legend(fontsize="x-small")
        staging.set_xlabel("block")
        save(figure, path, "Messages between two processes", _described(found))


def _band(
    axes: Any, sizes: Sequence[int], values: Sequence[Sequence[float]], factor: float, colour: str
) -> None:
    low, high = zip(*map(quartiles, values), strict=True)
    axes.fill_between(
        *(sizes, [factor * each for each in low], [factor * each for each in high]),
        color=colour,
        alpha=0.15,
        linewidth=0,
    )


def _described(found: Found) -> str:
    smallest = min(found.curves, key=lambda curve: statistics.median(curve.latency_s[0]))
    largest = max(found.curves, key=lambda curve: statistics.median(curve.bandwidth[-1]))
    best = min(zip(found.block_s, found.blocks, strict=True), key=lambda e: statistics.median(e[0]))
    return (
        "Three panels, both axes logarithmic: latency in us over bytes, bandwidth in MB/s over "
        "bytes, and the time of one staged message over the size of its blocks, measured and by "
        f"the model. Least latency at {size_text(smallest.sizes[0])}: {smallest.path}, "
        f"{1e6 * statistics.median(smallest.latency_s[0]):.3g} us. Most bandwidth at "
        f"{size_text(largest.sizes[-1])}: {largest.path}, "
        f"{1e-6 * statistics.median(largest.bandwidth[-1]):.3g} MB/s. Fastest blocks: "
        f"{size_text(best[1])}."
    )


if __name__ == "__main__":
    main()
