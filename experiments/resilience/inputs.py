"""Inputs of the simulation: the job, its hosts, and the cost of a failure."""

from dataclasses import dataclass
from typing import Final

HOUR_S: Final = 3600.0
DAY_S: Final = 24 * HOUR_S


@dataclass(frozen=True)
class Inputs:
    """A job of `stages` x `replicas` ranks; times in seconds. README.md says where each is from.

    `mtbf_s`: the mean time between failures of one host. `repair_s`: until a failed host is back.
    `detection_s`: the least and the most between a failure and the end of all processes.
    `restart_s`: from there until all ranks have met and built their stages. `save_s`: for which the
    job stands still for a checkpoint on disk, `load_s`: until all ranks have read it; `copy_s` and
    `fetch_s`: the same for copies in the memory of a neighbouring host. `rejoin_s`: what peers that
    live take to route around a loss, or to take a rank in, where nothing starts again.
    """

    stages: int = 50
    replicas: int = 20
    microbatches: int = 200
    ranks_per_host: int = 8
    spare_hosts: int = 0
    mtbf_s: float = 30 * DAY_S
    repair_s: float = 4 * HOUR_S
    horizon_s: float = 90 * DAY_S
    step_s: float = 30.0
    detection_s: tuple[float, float] = (15.0, 22.0)
    restart_s: float = 60.0
    save_s: float = 6.2
    load_s: float = 31.0
    copy_s: float = 1.2
    fetch_s: float = 1.2
    rejoin_s: float = 10.0

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks if no host is missing."""
        return self.stages * self.replicas

    @property
    def num_hosts(self) -> int:
        """Return the number of hosts of these ranks, without spare ones."""
        return -(-self.num_ranks // self.ranks_per_host)

    @property
    def job_mtbf_s(self) -> float:
        """Return the mean time between failures of all working hosts."""
        return self.mtbf_s / self.num_hosts
