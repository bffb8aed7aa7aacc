"""Latency and bandwidth between two processes by size, as osu_latency and osu_bw measure them.

Paths: `direct`, the backend sends the tensor's memory (Gloo on CPUs, NCCL on GPUs); `staged`, the
whole tensor goes through a host buffer at both ends, as for a device whose MPI takes no device
pointers; `staged in blocks`, the same with two alternating buffers, so that one block is copied
while another is sent (MVAPICH2-GPU, Wang et al., 2011); `shared memory`, the pipeline's transport
between processes of one host.
"""

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist

from experiments.outer.collectives.costs import Link, Terms
from experiments.outer.collectives.figures import markdown, quartiles, size_text
from experiments.outer.collectives.fitting import Fit, Sample, fit
from experiments.outer.collectives.lists import numbers
from experiments.outer.collectives.running import run_ranks
from gpipe_hpc.comm.transport.base import PlacedChannel, Transport
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.comm.world.world import World, collective_errors
from gpipe_hpc.schedule import Channel

SIZES: Final = tuple(4**power for power in range(12))
BLOCK_BYTES: Final = 512 * 1024
BLOCKS: Final = tuple(16 * 1024 * 4**power for power in range(6))
_MODULE: Final = "experiments.outer.collectives.point_to_point"
_CASE_BYTES: Final = 16 * 1024**2  # sent per case, so that each takes some milliseconds
_WINDOW: Final = 64  # concurrent messages, as in osu_bw
_WINDOW_BYTES: Final = 16 * 1024**2
_ACK_BYTES: Final = 4

Wait = Callable[[], object]


class MessagePath(Protocol):
    """A path from one process to the other."""

    def start_send(self, tensor: torch.Tensor) -> Wait:
        """Start sending; return a function that waits until the tensor may be changed."""

    def start_receive(self, tensor: torch.Tensor) -> Wait:
        """Start receiving; return a function that waits for the tensor."""


class Direct:
    """Sends and receives the tensor's own memory."""

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
    """A block to receive, with its buffer and its work after it is posted."""

    def __init__(self, block: torch.Tensor) -> None:
        self.block, self.buffer = block, block
        self.work: dist.Work | None = None


class Staged:
    """Sends through host buffers of `block_bytes`, or of the whole tensor if None."""

    def __init__(self, world: World, block_bytes: int | None) -> None:
        self._world, self._other = world, 1 - world.rank
        self._group = dist.new_group([0, 1], backend="gloo")
        self._block_bytes = block_bytes
        self._is_pinned = world.device.is_accelerator
        self._free: dict[int, list[torch.Tensor]] = {}
        self._unposted: deque[_Incoming] = deque()

    def start_send(self, tensor: torch.Tensor) -> Wait:
        """Copy each block while the previous one is sent."""
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
        """Copy each block while the next one arrives; messages must be waited for in order.

        A block is posted after all blocks before it, including those of earlier messages.
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
        """Return a host buffer, a free one if there is any."""
        free = self._free.setdefault(num_bytes, [])
        if free:
            return free.pop()
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)


class SharedMemory:
    """The pipeline's transport between processes of one host."""

    def __init__(self, world: World) -> None:
        to, back = (
            PlacedChannel(Channel(i, 1 - i, 0), source_rank=i, destination_rank=1 - i, tag=0)
            for i in (0, 1)
        )
        self._transport: Transport = world.transport([to, back])
        self._out, self._into = (to, back) if world.rank == 0 else (back, to)
        self._sent = self._received = 0

    def start_send(self, tensor: torch.Tensor) -> Wait:
        """Send; the tensor may be changed after the wait."""
        self._transport.send(self._out, "study", self._sent, tensor, 1)
        self._sent += 1
        return self._transport.finish

    def start_receive(self, tensor: torch.Tensor) -> Wait:
        """Receive into memory of the transport; `tensor` is not written."""
        number, self._received = self._received, self._received + 1

        def wait() -> None:
            self._transport.post(self._into, "study", number)
            self._transport.wait(self._into, "study", number)

        return wait


class Curve(NamedTuple):
    """Repetitions of latency and bandwidth of one path for each size."""

    path: str
    sizes: list[int]
    latency_s: list[list[float]]
    bandwidth: list[list[float]]  # bytes per second


class PathResults(NamedTuple):
    """All curves, and the seconds of a message staged in blocks for each block size."""

    device: str
    curves: list[Curve]
    staged_bytes: int
    blocks: list[int]
    block_s: list[list[float]]

    @classmethod
    def of(cls, read: dict[str, Any]) -> "PathResults":
        """Return the results read from JSON."""
        return cls(**{**read, "curves": [Curve(*each) for each in read["curves"]]})


# What the two ranks do.


def paths_of(world: World) -> dict[str, MessagePath]:
    """Return the paths between two ranks by name; the same call on both."""
    found: dict[str, MessagePath] = {
        "direct": Direct(world),
        "staged": Staged(world, None),
        "staged in blocks": Staged(world, BLOCK_BYTES),
    }
    if not world.device.is_accelerator:
        found["shared memory"] = SharedMemory(world)
    return found


def measured(world: World, sizes: Sequence[int], repeats: int, staged_bytes: int) -> PathResults:
    """Time all paths in rounds; the same call on both ranks.

    Times are those of rank 0, which gets an answer at the end of each measurement.
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
    return PathResults(kind, list(curves.values()), staged_bytes, blocks, block_s)


def _latency_s(world: World, path: MessagePath, vector: torch.Tensor) -> float:
    """Return half of the mean round-trip time."""
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


def _bandwidth(world: World, path: MessagePath, vector: torch.Tensor) -> float:
    """Return bytes per second of a window of concurrent messages, up to the answer."""
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
    """Measure as one of two ranks; rank 0 writes the results."""
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
    """Add the options of both the ranks and the command."""
    add = parser.add_argument
    add("--bytes", type=numbers(1), default=list(SIZES), metavar="N,...", help="of the messages")
    add("--repeats", type=int, default=7, help="measured rounds, after one more")
    add("--staged-bytes", type=int, default=8 * 1024**2, help="message that is cut into blocks")
    add("--device", default="cpu", help="cpu, or an accelerator as torch calls it")


def run(args: argparse.Namespace) -> None:
    """Start two ranks and print the results."""
    words = [
        f"--bytes={','.join(map(str, args.bytes))}",
        f"--repeats={args.repeats}",
        f"--staged-bytes={args.staged_bytes}",
        f"--device={args.device}",
    ]
    backend = "gloo" if args.device == "cpu" else "auto"
    found = PathResults.of(run_ranks(_MODULE, 2, words, backend=backend))
    text = report(found)
    print(text)


def link_of(curve: Curve) -> Fit:
    """Return alpha and beta of a path, fitted to the lower quartiles: alpha + n beta for n bytes.

    Other load only adds to times.
    """
    quiet = (quartiles(took)[0] for took in curve.latency_s)
    return fit(
        [Sample(Terms(1, size), took) for size, took in zip(curve.sizes, quiet, strict=True)]
    )


def pipeline_of(found: PathResults) -> Fit:
    """Return t and 1/B of staging in blocks by the model of MVAPICH2-GPU, (M/C + 2)(t + C/B).

    Three stages: copy to the host, network, copy from the host. B is the bandwidth of the slowest.
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


def report(found: PathResults) -> str:
    """Return the tables and the fitted models in Markdown."""
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


if __name__ == "__main__":
    main()
