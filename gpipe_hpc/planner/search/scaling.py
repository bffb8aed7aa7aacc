"""Times of layers for any micro-batch, from what a run measured for one size of them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from gpipe_hpc.planner.advice import Known
from gpipe_hpc.planner.costs.calibration import Calibration
from gpipe_hpc.planner.costs.gauges import MEASURED, Counted, LayerTimes, work_of
from gpipe_hpc.planner.costs.rates import Rates
from gpipe_hpc.planner.search.machine import Machine

_FLOPS_A_BYTE: Final = 100.0  # what accelerators compute while they read a byte, about


@dataclass(frozen=True)
class Scaling:
    """What layers took in a run, for a micro-batch of so many `samples`; `counted`: of that size.

    For another size each layer takes its counted seconds there, times what it took over its counted
    seconds for the size that was measured.
    """

    found: Calibration
    path: str
    samples: int
    counted: Counted

    def text(self) -> str:
        """Say what times stand on."""
        found = self.found
        hosts = "one host" if found.hosts == 1 else f"{found.hosts} hosts"
        return (
            f"layers: scaled from calibration of {self.path} ({found.ranks} rank"
            f"{'s' * (found.ranks > 1)} on {hosts}, {found.device_name or found.device}, "
            f"micro-batches of {self.samples} sample{'s' * (self.samples > 1)}): for other "
            f"micro-batches what each took over what it counts as"
        )

    @cached_property
    def rates(self) -> Rates:
        """Return the rates that its layers had together, where nothing else says any."""
        works = work_of(self.counted.count)
        flops = sum(each.forward.flops + each.backward.flops for each in works)
        took_s = sum(each.forward + each.backward for each in self.found.layers)
        rate = flops / took_s if flops and took_s else 1.0
        return Rates.alike(rate, rate / _FLOPS_A_BYTE)

    def scaled(self, counted: Counted, machine: Machine, pace: float) -> Known:
        """Return the layers for another micro-batch; `pace`: how slow the rank was that ran them.

        A part that counts as nothing takes as long as it took for each sample.
        """
        here, there = machine.priced(counted).times, machine.priced(self.counted).times
        more = sum(counted.count.inputs.tensors) / self.found.input_bytes
        times = [
            LayerTimes(
                *(
                    took / pace * (now / then if then else more)
                    for took, now, then in zip(*parts, strict=True)
                )
            )
            for parts in zip(self.found.layers, here, there, strict=True)
        ]
        return Known(counted.layers, tuple(times), counted.count, MEASURED)
