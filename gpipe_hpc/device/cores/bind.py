"""Ranks of one machine agree on who computes where, and with how many threads."""

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, NamedTuple

import torch

from gpipe_hpc.comm.world.world import World, together
from gpipe_hpc.device.cores.choice import Asked, Lot, lots_text, share_out
from gpipe_hpc.device.cores.given import given_cpus, keep_on, user_chose_threads
from gpipe_hpc.device.cores.machine import cores_with, tightest_quota
from gpipe_hpc.device.cores.to_come import wished_threads
from gpipe_hpc.device.host.machine import kernel_identity
from gpipe_hpc.errors import ConfigError

log = logging.getLogger("gpipe_hpc.comm")

BINDS: Final = ("auto", "none")
_MOST_LINES: Final = 8


class Bound(NamedTuple):
    """What was done: a line for each kind of machine, and how to undo it on this rank."""

    lines: list[str]
    undo: Callable[[], None]


def bind(world: World, how: str = "auto", num_threads: str | int | None = "auto") -> Bound:
    """Let each rank compute on CPUs of its own from now on; the same call on every rank.

    `how`: auto, or none to leave CPUs as they were given; see `share_out`. `num_threads`: of
    torch's operators on the CPU. auto: as many as the cores of the rank that has fewest, the same
    number on all ranks, so that replicas sum alike; what the user set by OMP_NUM_THREADS stays.
    None: as torch decides.

    Memory follows: Linux places a page near the CPU that first writes to it, so bind before layers
    are built. Threads that run already are moved. Other systems than Linux, and ranks that are
    threads of one process, bind nothing. Raises ConfigError for other words.
    """
    _check(how, num_threads)
    undo = ExitStack()
    undo.callback(_use_threads, torch.get_num_threads())
    if world.is_one_process and world.size > 1:
        _use_threads(num_threads if isinstance(num_threads, int) else None)
        return Bound([], undo.close)
    with together(world, "sharing out the cores"):
        return Bound(_agree(world, how, num_threads, undo), undo.close)


@contextmanager
def bound(
    world: World, how: str = "auto", num_threads: str | int | None = "auto"
) -> Iterator[list[str]]:
    """Bind the ranks within the block, see `bind`; yield what was done, in lines."""
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


class _Machine(NamedTuple):
    """What a rank is told of those on its machine: what each asks for, and which one it is."""

    ranks: list[Asked]
    number: int


class _Said(NamedTuple):
    """What ranks, one behind the other, have found: fewest threads, and where they are.

    `hosts`: for each way to share a machine one host by name, and how many; `more`: hosts left out.
    """

    num_threads: int
    hosts: dict[str, tuple[str, int]]
    more: int = 0


def _agree(world: World, how: str, num_threads: str | int | None, undo: ExitStack) -> list[str]:
    why = _why_threads(num_threads)
    given = given_cpus()
    if given is None:
        own, text = torch.get_num_threads(), "this system binds nothing, Linux does"
        number = 0 if world.rank == 0 else 1
    else:
        wish = wished_threads(num_threads)
        asked = Asked(given, world.device.numa_node, tightest_quota(), wish)
        machine = _met(world, asked)
        cores = cores_with(frozenset().union(*(rank.allowed for rank in machine.ranks)))
        lots = share_out(cores, machine.ranks, binds=how == "auto")
        lot, place = _of(lots, machine.number)
        if lot.is_bound:
            _bind(lot.cpus[place], undo)
        own, number = lot.num_threads[place], machine.number
        text = lots_text(lots, len({core.node for core in cores}))
    hosts = {} if number else {text: (socket.gethostname(), 1)}
    said = world.everybody.merge_object(_Said(own, hosts), _merged)
    if num_threads is not None:
        own = num_threads if isinstance(num_threads, int) else said.num_threads
        _use_threads(own)
    return _lines(said, f"{own} thread{'s' * (own > 1)} each, {why}")


_BY_USER: Final = "by OMP_NUM_THREADS or MKL_NUM_THREADS"


def _why_threads(num_threads: str | int | None) -> str:
    if isinstance(num_threads, int):
        return f"by num_threads={num_threads}"
    if num_threads is None:
        return "as torch decides"
    return _BY_USER if user_chose_threads() else "a core each, of the rank that has fewest"


def _met(world: World, asked: Asked) -> _Machine:
    """Return the ranks of this machine, as rank 0 has sorted all of them by machine."""
    told = world.everybody.gather_object((kernel_identity(), asked), world.everybody.ranks[0])
    dealt = None if told is None else _sorted_by_machine(told)
    machine: _Machine = world.everybody.deal_object(dealt, world.everybody.ranks[0])
    return machine


def _sorted_by_machine(told: Sequence[tuple[str, Asked]]) -> list[_Machine]:
    ranks_of: dict[str, list[Asked]] = {}
    found = []
    for identity, asked in told:
        ranks = ranks_of.setdefault(identity, [])
        found.append(_Machine(ranks, len(ranks)))
        ranks.append(asked)
    return found


def _of(lots: Sequence[Lot], number: int) -> tuple[Lot, int]:
    return next((lot, lot.members.index(number)) for lot in lots if number in lot.members)


def _bind(cpus: frozenset[int], undo: ExitStack) -> None:
    try:
        undo.callback(keep_on(cpus))
    except OSError as error:
        log.warning(
            "cores: this rank stays on the CPUs that it was given, as the system refuses to bind "
            "it: %s; train.bind=none leaves all ranks as they are",
            error,
        )


def _use_threads(num_threads: int | None) -> None:
    # Even the same number again would change how MKL goes about its work.
    if num_threads is not None and num_threads != torch.get_num_threads():
        torch.set_num_threads(num_threads)


def _merged(these: _Said, others: _Said) -> _Said:
    hosts, more = dict(these.hosts), these.more + others.more
    for text, (host, count) in others.hosts.items():
        if text in hosts:
            hosts[text] = (hosts[text][0], hosts[text][1] + count)
        elif len(hosts) < _MOST_LINES:
            hosts[text] = (host, count)
        else:
            more += count
    return _Said(min(these.num_threads, others.num_threads), hosts, more)


def _lines(said: _Said, threads: str) -> list[str]:
    lines = [
        f"cores of {host}{f' and {count - 1} more like it' * (count > 1)}: {text}; {threads}"
        for text, (host, count) in said.hosts.items()
    ]
    return lines + [f"cores: {said.more} more machines, shared out otherwise"] * (said.more > 0)
