"""Models of the all-reduce of libraries on a cluster, with their sources.

Nothing is measured and no library is called. A profile is the algorithm that a library uses at a
size, according to its paper or source, with alpha-beta costs on two levels: ranks of one host are
linked by `within`, hosts by `between`, with one network card per host and direction.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from experiments.outer.collectives.costs import Link
from experiments.outer.collectives.figures import markdown, size_text
from gpipe_hpc.models import build_model

SIZES: Final = tuple(1024 * 4**power for power in range(10))


class Cluster(NamedTuple):
    """Hosts of `g` ranks each; `memory_byte_s` is the time to copy one byte on a device."""

    hosts: int
    g: int
    within: Link
    between: Link
    memory_byte_s: float

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.hosts * self.g

    @property
    def slowest(self) -> Link:
        """Return the link that limits a step in which some rank sends to another host."""
        return self.between if self.hosts > 1 else self.within


class Use(NamedTuple):
    """An algorithm and its time."""

    algorithm: str
    seconds: float


# Algorithms on two levels.


def ring(of: Cluster, b: float) -> Use:
    """Return a ring in the order of hosts; each step waits for the link to the next host."""
    n = of.ranks
    step_s = of.slowest.start_s + b / n * (of.slowest.byte_s + of.within.add_s)
    return Use("ring", 2 * (n - 1) * step_s)


def recursive_doubling(of: Cluster, b: float) -> Use:
    """Return partners at distances 1, 2, ...; from g on, all ranks of a host share its card."""
    return Use("recursive doubling", sum(_exchange_s(of, d, b) for d in _distances(of)))


def rabenseifner(of: Cluster, b: float) -> Use:
    """Return halving at distances 1, 2, ..., so that half stays within the host, then doubling."""
    took_s, part = 0.0, b
    for distance in _distances(of):
        part /= 2
        took_s += 2 * _exchange_s(of, distance, part) - part * of.within.add_s
    return Use("Rabenseifner", took_s)


def hierarchical(of: Cluster, b: float) -> Use:
    """Return a reduce-scatter within hosts, one ring per shard between them, and an all-gather.

    The g rings between hosts share the cards: together they send 2 (h-1)/h of the vector.
    """
    g, h = of.g, of.hosts
    inside_s = (g - 1) * (of.within.start_s + b / g * of.within.byte_s)
    added_s = b * of.within.add_s * ((g - 1) / g + (h - 1) / (h * g))
    across_s = (h - 1) * (of.between.start_s + b / h * of.between.byte_s)
    return Use("hierarchical rings", 2 * inside_s + 2 * across_s + added_s)


def double_binary_tree(of: Cluster, b: float) -> Use:
    """Return a chain within each host and two binary trees over hosts with half the vector each."""
    start_s = 2 * (
        (of.g - 1) * of.within.start_s + math.ceil(math.log2(of.hosts)) * of.between.start_s
    )
    return Use("double binary tree", start_s + 2 * b * of.slowest.byte_s)


def _distances(of: Cluster) -> list[int]:
    return [1 << k for k in range(math.ceil(math.log2(of.ranks)))]


def _exchange_s(of: Cluster, distance: int, b: float) -> float:
    link, sharing = (of.within, 1) if distance < of.g else (of.between, of.g)
    return link.start_s + b * (sharing * link.byte_s + of.within.add_s)


# Libraries.


def baidu(of: Cluster, b: float) -> Use:
    return ring(of, b)


_SEGMENT_BYTES: Final = 1024**2


def gloo(of: Cluster, b: float) -> Use:
    """Return a ring with at least two segments per rank, each of at most 1 MiB."""
    n = of.ranks
    segments = max(2, math.ceil(b / n / _SEGMENT_BYTES))
    extra_s = 2 * (n - 1) * (segments - 1) * of.slowest.start_s
    return Use("ring in segments", ring(of, b).seconds + extra_s)


# Microseconds by protocol, within a host (NVLink) and between hosts (network), and how much of the
# bandwidth is left; base latencies. From the tables of NCCL's src/graph/tuning.cc.
_NCCL: Final = {
    ("ring", "LL"): (6.6, 0.6, 2.7, 0.5),
    ("ring", "LL128"): (14.0, 1.9, 4.0, 120 / 128),
    ("ring", "Simple"): (8.4, 3.4, 14.0, 1.0),
    ("tree", "LL"): (6.8, 0.6, 5.0, 0.92 / 3.8),
    ("tree", "LL128"): (14.0, 1.25, 8.5, 0.92 * 120 / 128),
    ("tree", "Simple"): (8.4, 4.0, 14.0, 0.92),
}


def nccl(of: Cluster, b: float) -> Use:
    """Return the fastest of ring and double binary tree over three protocols, as its tuner does."""
    n, g, h = of.ranks, of.g, of.hosts
    uses = []
    for (algorithm, protocol), (base, within, between, share) in _NCCL.items():
        if algorithm == "ring":
            across = 2 * (h - 1)
            hops = (2 * (n - 1) - across) * within + across * between
            moved = 2 * (n - 1) / n * b
        else:
            hops = 2 * ((g - 1) * within + math.ceil(math.log2(h)) * between)
            moved = 2 * b
        seconds = 1e-6 * (base + hops) + moved * of.slowest.byte_s / share
        uses.append(Use(f"{algorithm} with {protocol}", seconds))
    return min(uses, key=lambda use: use.seconds)


_CYCLE_S: Final = 1e-3


def horovod(of: Cluster, b: float) -> Use:
    """Return half a cycle of waiting, copies into and out of the fusion buffer, and NCCL's sum."""
    inner = nccl(of, b)
    copies_s = 2 * b * of.memory_byte_s
    return Use(inner.algorithm, _CYCLE_S / 2 + copies_s + inner.seconds)


def ddl(of: Cluster, b: float) -> Use:
    return hierarchical(of, b)


def aluminum(of: Cluster, b: float) -> Use:
    """Return the fastest of Aluminum's own algorithms and NCCL's ring."""
    return min(
        (recursive_doubling(of, b), rabenseifner(of, b), ring(of, b)), key=lambda use: use.seconds
    )


_MPICH_SHORT_BYTES: Final = 2048


def mlsl(of: Cluster, b: float) -> Use:
    """Return MPI's all-reduce by MPICH's rule, run by separate processes."""
    own = recursive_doubling if b <= _MPICH_SHORT_BYTES else rabenseifner
    return own(of, b)


class Profile(NamedTuple):
    """A library: its algorithm at a size, and the source.

    `fuses_bytes` is the size of its fusion buffer; 0 if it sums each tensor separately.
    """

    name: str
    use: Callable[[Cluster, float], Use]
    fuses_bytes: float
    source: str


PROFILES: Final = (
    Profile(
        "Baidu's ring",
        baidu,
        0,
        "Gibiansky, Bringing HPC techniques to deep learning, 2017: one ring at all sizes, one "
        "tensor at a time",
    ),
    Profile(
        "Gloo",
        gloo,
        25e6,
        "gloo/allreduce.cc, as torch calls it: a ring in segments; the buckets are DDP's 25 MB",
    ),
    Profile(
        "NCCL",
        nccl,
        25e6,
        "its src/graph/tuning.cc: least of ring and double binary tree over protocols; "
        "its latencies, not --within and --between; the buckets are DDP's 25 MB",
    ),
    Profile(
        "Horovod",
        horovod,
        128 * 1024**2,
        "its docs and operations.cc: half a cycle of 1 ms, a copy into a fusion buffer of 128 MB "
        "and back, and NCCL's sum",
    ),
    Profile(
        "DDL",
        ddl,
        64e6,
        "Cho et al., PowerAI DDL, 2017: rings in each dimension of the network; the shapes of its "
        "rings are assumed, and that it sums in buffers of 64 MB",
    ),
    Profile(
        "Aluminum",
        aluminum,
        0,
        "Dryden et al., MLHPC 2018, and its 2018 source: recursive doubling, Rabenseifner, ring; "
        "chosen by size, here by the least cost: its own thresholds were not found",
    ),
    Profile(
        "MLSL",
        mlsl,
        0,
        "intel/MLSL: on top of MPI, with servers that run in parallel; MPICH's rule "
        "(2 KiB) stands for Intel MPI's, which was not found",
    ),
)
"""Models on equal hardware; their papers used different hardware."""


def exposed_s(profile: Profile, of: Cluster, tensors: Sequence[float]) -> tuple[int, float]:
    """Return the number of sums and their total time for a list of tensors."""
    buffers: list[float] = []
    for size in tensors:
        if buffers and profile.fuses_bytes and buffers[-1] + size <= profile.fuses_bytes:
            buffers[-1] += size
        else:
            buffers.append(size)
    return len(buffers), sum(profile.use(of, size).seconds for size in buffers)


def resnet50_bytes() -> list[float]:
    """Return the bytes of each gradient of ResNet-50, in the order of a backward."""
    with torch.device("meta"):
        layers = [layer.build() for layer in build_model("resnet50")]
    sizes = [float(4 * p.numel()) for layer in layers for p in layer.parameters()]
    return sizes[::-1]


def switches(profile: Profile, of: Cluster, least: int, most: int) -> list[tuple[int, str]]:
    """Return the sizes, exact to a byte, at which a profile changes to another algorithm."""
    found = []
    size = least
    while size < most:
        following = min(most, math.ceil(size * 2**0.25))
        before, after = (profile.use(of, b).algorithm for b in (size, following))
        if before != after:
            low, high = size, following
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (
                    (middle, high) if profile.use(of, middle).algorithm == before else (low, middle)
                )
            found.append((high, profile.use(of, high).algorithm))
        size = following
    return found


# The command.


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command; the defaults are 16 hosts of 4 GPUs on 100 Gb/s."""
    add = parser.add_argument
    add("--hosts", type=int, default=16)
    add("--group", type=int, default=4, help="ranks per host")
    add("--within-latency", type=float, default=4e-6, help="seconds, between ranks of a host")
    add("--within-bandwidth", type=float, default=40e9, help="bytes per second")
    add("--between-latency", type=float, default=6e-6, help="seconds, between hosts")
    add("--between-bandwidth", type=float, default=12.5e9, help="bytes per second of a host")
    add("--memory-bandwidth", type=float, default=400e9, help="bytes per second of a copy")


def run(args: argparse.Namespace) -> None:
    """Print the tables for a cluster."""
    of = Cluster(
        args.hosts,
        args.group,
        Link(args.within_latency, 1 / args.within_bandwidth),
        Link(args.between_latency, 1 / args.between_bandwidth),
        1 / args.memory_bandwidth,
    )
    text = report(of)
    print(text)


def report(of: Cluster) -> str:
    """Return the tables in Markdown, marked as models."""
    lines = [
        f"All-reduce on {of.hosts} hosts of {of.g} ranks. **Models, no measurements**: ms.\n",
        markdown(
            ["size", *(profile.name for profile in PROFILES)],
            [
                [size_text(b), *(f"{1e3 * p.use(of, b).seconds:.3g}" for p in PROFILES)]
                for b in SIZES
            ],
        ),
        "\nAlgorithms, the sizes from which they are used, and sources:\n",
    ]
    for profile in PROFILES:
        first = profile.use(of, SIZES[0]).algorithm
        later = [
            f"{algorithm} from {size_text(size)}"
            for size, algorithm in switches(profile, of, SIZES[0], SIZES[-1])
        ]
        lines.append(f"- {profile.name}: {', '.join([first, *later])}. Source: {profile.source}.")
    tensors = resnet50_bytes()
    rows = []
    for profile in PROFILES:
        count, took_s = exposed_s(profile, of, tensors)
        rows.append([profile.name, str(count), f"{1e3 * took_s:.3g}"])
    lines += [
        f"\nThe {len(tensors)} gradients of ResNet-50 ({sum(tensors) / 1e6:.1f} MB), summed one "
        "after the other without overlap:\n",
        markdown(["library", "sums", "ms"], rows),
    ]
    return "\n".join(lines)
