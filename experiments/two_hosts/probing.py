"""Measure the round trip time and the rate of a link, compared with the requested ones."""

import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from experiments.two_hosts.hosts import MTU, TwoHosts
from experiments.two_hosts.machine import Host, Job

_PROBE: Final = str(Path(__file__).with_name("probe.py"))
_PORT: Final = 29_400
_NUM_TRIPS: Final = 40
_HEADER_BYTES: Final = 52  # IP and TCP headers per packet, with time stamps
_LIMIT_S: Final = 60.0


class Accuracy(NamedTuple):
    """Requested and achieved values; rates are bits per second of TCP payload."""

    rate: float
    delay_s: float
    trip_s: float  # median round trip of one byte on an idle link
    there: float
    back: float
    both: tuple[float, float]  # both directions at once, as in an exchange of two ranks
    late_s: float

    @property
    def share(self) -> float:
        """Return the smallest achieved rate relative to that of a perfect link."""
        perfect = self.rate * (MTU - _HEADER_BYTES) / MTU
        return min(self.there, self.back, *self.both) / perfect if perfect else 1.0

    def text(self) -> str:
        """Return the result as two lines of text."""
        there, back, *both = (f"{x / 1e6:.1f}" for x in (self.there, self.back, *self.both))
        return (
            f"asked: {self.rate / 1e6:g} Mbit/s and {1e3 * self.delay_s:g} ms each way\n"
            f"achieved: {there} there, {back} back, {' and '.join(both)} Mbit/s both at once; "
            f"round trip {1e3 * self.trip_s:.2f} ms; "
            f"99 of 100 packets at most {1e3 * self.late_s:.2f} ms late"
        )


def measure(pair: TwoHosts, seconds: float = 2.0) -> Accuracy:
    """Measure the link in both directions, and both at once; `seconds` for each of the three."""
    first, second = pair.hosts
    with tempfile.TemporaryDirectory(prefix="two_hosts_") as folder:
        start = _starter(Path(folder))
        servers = [start(host, "serve", _PORT) for host in pair.hosts]

        def ask(source: Host, target: Host, what: str, amount: float) -> Job:
            return start(source, what, target.address, _PORT, amount)

        trips_s = _read(ask(first, second, "trips", _NUM_TRIPS))
        there = _read(ask(first, second, "stream", seconds))
        back = _read(ask(second, first, "stream", seconds))
        at_once = [ask(first, second, "stream", seconds), ask(second, first, "stream", seconds)]
        both = (_read(at_once[0]), _read(at_once[1]))
        for server in servers:
            server.signal(signal.SIGKILL)
    return Accuracy(
        rate=pair.link.rate,
        delay_s=pair.link.delay_s,
        trip_s=statistics.median(trips_s),
        there=there,
        back=back,
        both=both,
        late_s=max(way.late_s for way in pair.link.counts()),
    )


def _starter(folder: Path) -> Callable[..., Job]:
    """Return a function that starts the measurement program, each time with its own output."""

    def start(host: Host, *words: object) -> Job:
        output = folder / f"{len(list(folder.iterdir()))}.txt"
        output.touch()
        command = [sys.executable, "-I", _PROBE, *map(str, words)]
        return host.start(command, output=output, folder=folder)

    return start


def _read(job: Job) -> Any:
    """Return the output of a program once it has ended."""
    code = job.wait(_LIMIT_S)
    assert code == 0, f"two hosts: a measurement failed with {code}: {job.output}"
    return json.loads(job.output)
