"""Binding of the ranks of a machine to separate CPUs, and their numbers of threads."""

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, NamedTuple

import torch

from gpipe_hpc.comm.world.world import World, collective_errors
from gpipe_hpc.device.cores.assignment import (
    CpuAssignment,
    CpuRequest,
    assign_cpus,
    assignments_text,
)
from gpipe_hpc.device.cores.inherited import bind_process, inherited_cpus, user_chose_threads
from gpipe_hpc.device.cores.machine import cores_with, tightest_quota
from gpipe_hpc.device.cores.planned_ranks import requested_threads
from gpipe_hpc.device.host.machine import kernel_identity
from gpipe_hpc.errors import ConfigError

log = logging.getLogger("gpipe_hpc.comm")

BINDS: Final = ("auto", "none")
_MOST_LINES: Final = 8


class Binding(NamedTuple):
    """Result of `bind`: log lines, one per distinct assignment, and a function that undoes it."""

    lines: list[str]
    undo: Callable[[], None]


def bind(world: World, how: str = "auto", num_threads: str | int | None = "auto") -> Binding:
    """Bind each rank to its own CPUs; a collective call.

    Linux allocates a page on the NUMA node of the CPU that first writes to it, so call this before
    layers are built. Threads that already run are moved. Systems other than Linux, and ranks that
    are threads of one process, are not bound.

    Args:
        how: ``auto``, or ``none`` to leave CPUs unchanged; see `assign_cpus`.
        num_threads: intra-op threads of torch on the CPU. ``auto``: the number of cores of the rank
            with the fewest, equal on all ranks so that replicas sum in the same order, unless the
            user set OMP_NUM_THREADS. None: torch's default.

    Raises ConfigError for other values.
    """
    _check(how, num_threads)
    undo = ExitStack()
    undo.callback(_use_threads, torch.get_num_threads())
    if world.is_one_process and world.size > 1:
        _use_threads(num_threads if isinstance(num_threads, int) else None)
        return Binding([], undo.close)
    with collective_errors(world, "sharing out the cores"):
        return Binding(_agree(world, how, num_threads, undo), undo.close)


@contextmanager
def bound(
    world: World, how: str = "auto", num_threads: str | int | None = "auto"
) -> Iterator[list[str]]:
    """Bind the ranks within a context, see `bind`; yield the log lines."""
    lines, undo = bind(world, how, num_threads)
    try:
        yield lines
    finally:
        undo()


def _check(how: str, num_threads: str | int | None) -> None:
    if how not in BINDS:
        raise ConfigError(f"bind: expected {' or '.join(BINDS)}, got {how!r}; use one of them")
    if isinstance(num_threads, str) and num_threads != "auto":
        raise ConfigError(
            f"num_threads: expected auto, a whole number or None, got {num_threads!r}; correct it"
        )


class _RankRequests(NamedTuple):
    """The requests of all ranks of a machine, and the index of this rank among them."""

    ranks: list[CpuRequest]
    number: int


class _BindReport(NamedTuple):
    """Combined result of several ranks: the smallest number of threads, and the assignments.

    `hosts` maps the text of an assignment to an example host and the number of hosts with that
    assignment; `more` counts hosts with further assignments.
    """

    num_threads: int
    hosts: dict[str, tuple[str, int]]
    more: int = 0


def _agree(world: World, how: str, num_threads: str | int | None, undo: ExitStack) -> list[str]:
    why = _why_threads(num_threads)
    given = inherited_cpus()
    if given is None:
        own, text = torch.get_num_threads(), "not bound: binding is supported on Linux only"
        number = 0 if world.rank == 0 else 1
    else:
        wish = requested_threads(num_threads)
        asked = CpuRequest(given, world.device.numa_node, tightest_quota(), wish)
        machine = _exchange_requests(world, asked)
        cores = cores_with(frozenset().union(*(rank.allowed for rank in machine.ranks)))
        lots = assign_cpus(cores, machine.ranks, binds=how == "auto")
        lot, place = _find_lot(lots, machine.number)
        if lot.is_bound:
            _bind(lot.cpus[place], undo)
        own, number = lot.num_threads[place], machine.number
        text = assignments_text(lots, len({core.node for core in cores}))
    hosts = {} if number else {text: (socket.gethostname(), 1)}
    said = world.world_group.merge_object(_BindReport(own, hosts), _merge_reports)
    if num_threads is not None:
        own = num_threads if isinstance(num_threads, int) else said.num_threads
        _use_threads(own)
    return _lines(said, f"{own} thread{'s' * (own > 1)} each, {why}")


_BY_USER: Final = "by OMP_NUM_THREADS or MKL_NUM_THREADS"


def _why_threads(num_threads: str | int | None) -> str:
    if isinstance(num_threads, int):
        return f"by num_threads={num_threads}"
    if num_threads is None:
        return "chosen by torch"
    return _BY_USER if user_chose_threads() else "one per core of the rank with the fewest cores"


def _exchange_requests(world: World, asked: CpuRequest) -> _RankRequests:
    """Return the requests of all ranks of this machine; rank 0 groups the ranks by machine."""
    told = world.world_group.gather_object((kernel_identity(), asked), world.world_group.ranks[0])
    dealt = None if told is None else _sorted_by_machine(told)
    machine: _RankRequests = world.world_group.scatter_object(dealt, world.world_group.ranks[0])
    return machine


def _sorted_by_machine(told: Sequence[tuple[str, CpuRequest]]) -> list[_RankRequests]:
    ranks_of: dict[str, list[CpuRequest]] = {}
    found = []
    for identity, asked in told:
        ranks = ranks_of.setdefault(identity, [])
        found.append(_RankRequests(ranks, len(ranks)))
        ranks.append(asked)
    return found


def _find_lot(lots: Sequence[CpuAssignment], number: int) -> tuple[CpuAssignment, int]:
    return next((lot, lot.members.index(number)) for lot in lots if number in lot.members)


def _bind(cpus: frozenset[int], undo: ExitStack) -> None:
    try:
        undo.callback(bind_process(cpus))
    except OSError as error:
        log.warning(
            "cores: cannot bind this rank to its CPUs, so its affinity is unchanged: %s; "
            "use train.bind=none to leave all ranks unbound",
            error,
        )


def _use_threads(num_threads: int | None) -> None:
    # Setting even the same number again changes MKL's choice of algorithms.
    if num_threads is not None and num_threads != torch.get_num_threads():
        torch.set_num_threads(num_threads)


def _merge_reports(these: _BindReport, others: _BindReport) -> _BindReport:
    hosts, more = dict(these.hosts), these.more + others.more
    for text, (host, count) in others.hosts.items():
        if text in hosts:
            hosts[text] = (hosts[text][0], hosts[text][1] + count)
        elif len(hosts) < _MOST_LINES:
            hosts[text] = (host, count)
        else:
            more += count
    return _BindReport(min(these.num_threads, others.num_threads), hosts, more)


def _lines(said: _BindReport, threads: str) -> list[str]:
    lines = [
        f"cores of {host}{f' and {count - 1} more' * (count > 1)}: {text}; {threads}"
        for text, (host, count) in said.hosts.items()
    ]
    return lines + [f"cores: {said.more} further machines with other assignments"] * (said.more > 0)
