"""Event-based simulation of one job under a policy."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from experiments.resilience.formulas import daly_s
from experiments.resilience.hosts import Event, events
from experiments.resilience.inputs import Inputs


@dataclass(frozen=True)
class Policy:
    """What a job does about a failure.

    `slowdown`: how many times as long a step takes with so many hosts missing; None: it only runs
    on as many hosts as it has begun with, and waits for them. `in_memory`: neighbours keep copies.
    `stays`: nobody starts again, the others route around the loss. `spare_hosts` stand by.
    `interval_s`: of work between two checkpoints (two copies), None for Daly's best.
    """

    name: str
    slowdown: Callable[[int], float] | None = None
    in_memory: bool = True
    stays: bool = False
    spare_hosts: int = 0
    interval_s: float | None = None

    def interval(self, inputs: Inputs) -> float:
        """Return the seconds of work between two checkpoints or copies."""
        if self.interval_s is not None:
            return self.interval_s
        return daly_s(inputs.job_mtbf_s, self.pause(inputs))

    def pause(self, inputs: Inputs) -> float:
        """Return the seconds that the job stops for one of them."""
        return inputs.copy_s if self.in_memory else inputs.save_s


@dataclass
class Job:
    """The state of a job between two events.

    `kept_s`: the work that a restart goes on from, in seconds of a job without failures; `phase_s`:
    how far the cycle of work and checkpoint is since then. `ready_s`: when it works again, infinity
    where it waits for hosts, None while it works.
    """

    inputs: Inputs
    policy: Policy
    rng: random.Random
    now_s: float = 0.0
    kept_s: float = 0.0
    phase_s: float = 0.0
    ready_s: float | None = None
    failed_s: float = 0.0
    down: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)
    lost_together: set[int] = field(default_factory=set)
    num_failures: int = 0

    def __post_init__(self) -> None:
        """Start on the hosts that are not spare."""
        self.used = set(range(self.inputs.num_hosts))
        self.cycle_s = self.policy.interval(self.inputs)
        self.pause_s = self.policy.pause(self.inputs)
        # Copies in memory are no backup: there are checkpoints on disk, too, as seldom as is best.
        self.disk_s = daly_s(self.inputs.job_mtbf_s * self.inputs.num_hosts, self.inputs.save_s)
        self.rate = self._rate()

    def _rate(self) -> float:
        """Return the work done per second, relative to a job without missing hosts."""
        missing = self.inputs.num_hosts - len(self.used)
        slow = 1.0 if not missing or self.policy.slowdown is None else self.policy.slowdown(missing)
        on_disk = self.inputs.save_s / self.disk_s if self.policy.in_memory else 0.0
        return 1 / slow / (1 + on_disk)

    def advance(self, until_s: float) -> None:
        """Advance to the next event."""
        if self.ready_s is not None:
            if self.ready_s > until_s:
                self.now_s = until_s
                return
            self.now_s, self.ready_s, self.phase_s = self.ready_s, None, 0.0
            self.lost_together.clear()
            self.rate = self._rate()
        whole = self.cycle_s + self.pause_s
        cycles, self.phase_s = divmod(self.phase_s + until_s - self.now_s, whole)
        self.kept_s += cycles * self.cycle_s * self.rate
        self.now_s = until_s

    @property
    def done_s(self) -> float:
        """Return the work done so far, saved or not."""
        return self.kept_s + min(self.phase_s, self.cycle_s) * self.rate

    def fail(self, host: int) -> None:
        """Remove a host."""
        self.down.add(host)
        if host not in self.used:
            return
        self.num_failures += 1
        self.used.discard(host)
        if self.policy.stays:
            # The step under way is lost, on average half of it.
            self.kept_s = max(0.0, self.done_s - 0.5 * self.inputs.step_s * self.rate)
        self.phase_s, self.failed_s = 0.0, self.now_s + self.rng.uniform(*self.inputs.detection_s)
        self.lost_together.add(host)
        if self.policy.in_memory and not self.policy.stays and self._neighbour_is_lost(host):
            self.kept_s -= self.kept_s % self.disk_s
        self._recover()

    def _neighbour_is_lost(self, host: int) -> bool:
        count = self.inputs.num_hosts + self.policy.spare_hosts
        return bool({(host - 1) % count, (host + 1) % count} & self.lost_together)

    def _recover(self) -> None:
        """Start on the available hosts, or wait for more."""
        inputs, policy = self.inputs, self.policy
        every = range(inputs.num_hosts + policy.spare_hosts)
        if policy.slowdown is None:
            free = (host for host in every if host not in self.used and host not in self.down)
            while len(self.used) < inputs.num_hosts and (host := next(free, None)) is not None:
                self.used.add(host)
            can_run = len(self.used) == inputs.num_hosts
        else:
            can_run = math.isfinite(policy.slowdown(inputs.num_hosts - len(self.used)))
        again_s = self._again_s()
        self.ready_s = max(self.now_s, self.failed_s) + again_s if can_run else math.inf

    def _again_s(self) -> float:
        if self.policy.stays:
            return self.inputs.rejoin_s
        load_s = self.inputs.fetch_s if self.policy.in_memory else self.inputs.load_s
        return self.inputs.restart_s + load_s

    def come_back(self, host: int) -> None:
        """Add a host that returned."""
        self.down.discard(host)
        if self.policy.slowdown is None:
            if self.ready_s == math.inf:
                self._recover()
            return
        if host >= self.inputs.num_hosts:
            return
        self.used.add(host)
        if self.ready_s is None:  # grow: save, and start again with nothing lost
            self.kept_s, self.phase_s = self.done_s, 0.0
            save_s = 0.0 if self.policy.stays else self.pause_s
            self.ready_s = self.now_s + save_s + self._again_s()
        elif self.ready_s == math.inf:
            self._recover()


def goodput(
    inputs: Inputs, policy: Policy, seed: int, happened: Sequence[Event] | None = None
) -> float:
    """Return the work that lasts, as a share of what all hosts could do, spare ones included.

    1.0: a job without failures, checkpoints and spare hosts. `happened`: to the hosts; None: drawn
    by the seed.
    """
    job = Job(inputs, policy, random.Random(f"detection {seed}"))
    if happened is None:
        happened = events(replace(inputs, spare_hosts=policy.spare_hosts), seed)
    for event in happened:
        if event.time_s >= inputs.horizon_s:
            break
        job.advance(event.time_s)
        (job.come_back if event.is_up else job.fail)(event.host)
    job.advance(inputs.horizon_s)
    paid = inputs.num_hosts + policy.spare_hosts
    return job.done_s / inputs.horizon_s * inputs.num_hosts / paid
