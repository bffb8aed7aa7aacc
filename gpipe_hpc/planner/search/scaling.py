"""Scale the layer times measured by a run to other micro-batch sizes."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from gpipe_hpc.planner.advice import KnownCosts
from gpipe_hpc.planner.costs.calibration import Calibration
from gpipe_hpc.planner.costs.cost_models import MEASURED, CountedCosts, LayerTimes, work_of
from gpipe_hpc.planner.costs.rates import Rates
from gpipe_hpc.planner.search.machine import Machine

_FLOPS_A_BYTE: Final = 100.0  # typical ratio of FLOP/s to memory bytes/s of accelerators


@dataclass(frozen=True)
class Scaling:
    """Layer times that a run measured with micro-batches of `samples` samples, and their counts.

    For another size, each layer's counted seconds are multiplied by its ratio of measured to
    counted seconds at the measured size.
    """

    found: Calibration
    path: str
    samples: int
    counted: CountedCosts

    def text(self) -> str:
        """Describe the source of the layer times."""
        found = self.found
        hosts = "one host" if found.hosts == 1 else f"{found.hosts} hosts"
        return (
            f"layers: scaled from calibration of {self.path} ({found.ranks} rank"
            f"{'s' * (found.ranks > 1)} on {hosts}, {found.device_name or found.device}, "
            f"micro-batches of {self.samples} sample{'s' * (self.samples > 1)}); other sizes by "
            f"the ratio of measured to counted time of each layer"
        )

    @cached_property
    def rates(self) -> Rates:
        """Return the mean FLOP/s and bytes/s of the measured layers, if no rates are given."""
        works = work_of(self.counted.count)
        flops = sum(each.forward.flops + each.backward.flops for each in works)
        took_s = sum(each.forward + each.backward for each in self.found.layers)
        rate = flops / took_s if flops and took_s else 1.0
        return Rates.alike(rate, rate / _FLOPS_A_BYTE)

    def scaled(self, counted: CountedCosts, machine: Machine, pace: float) -> KnownCosts:
        """Return the layer times for another micro-batch size.

        `pace` is the slowdown of the rank that measured. Passes without counted work scale with the
        number of input bytes.
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
        return KnownCosts(counted.layers, tuple(times), counted.count, MEASURED)
