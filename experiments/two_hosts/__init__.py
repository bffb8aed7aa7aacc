"""Two simulated hosts on one machine, connected by a link with a rate and a delay.

Each host is a set of Linux namespaces: network, mounts (with its own /proc, /dev/shm and
/etc/hosts), host name and processes. A program of this package forwards the packets between them,
because kernels without netem cannot shape a link. Programs on a host run unchanged.

    python -m experiments.two_hosts --rate 100e6 --delay 0.005
    python -m experiments.two_hosts --rate 100e6 --delay 0.005 -- -m gpipe_hpc.train ...
"""

from experiments.two_hosts.hosts import TwoHosts
from experiments.two_hosts.link import Counts, Link, OneWay
from experiments.two_hosts.machine import Host, Job, LackingError
from experiments.two_hosts.probing import Accuracy, measure
from experiments.two_hosts.ranks import Ranks, start_ranks

__all__ = [
    "Accuracy",
    "Counts",
    "Host",
    "Job",
    "LackingError",
    "Link",
    "OneWay",
    "Ranks",
    "TwoHosts",
    "measure",
    "start_ranks",
]
