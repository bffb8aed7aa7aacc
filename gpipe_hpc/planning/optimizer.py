"""What an optimizer keeps beside the weights."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from gpipe_hpc.planning.trial import Weight

_WIDE: Final = 4  # bytes of a float32


class OptimizerMemory(NamedTuple):
    """`states`: numbers of a trained parameter, of its own size unless it has a master.

    `masters`: parameters smaller than float32 have one, of float32, and their states are so too.
    `gradient_copies`: of each trained parameter's gradient.
    """

    states: int
    masters: bool = False
    gradient_copies: int = 0

    @classmethod
    def of(cls, given: "int | OptimizerMemory") -> "OptimizerMemory":
        """Take a number of states without masters, as torch's optimizers keep them."""
        return given if isinstance(given, OptimizerMemory) else cls(given)

    def of_weights(self, weights: Iterable[Weight]) -> int:
        """Return the bytes for these weights; frozen ones need none."""
        return sum(self._of_weight(weight) for weight in weights if weight.is_trained)

    def _of_weight(self, weight: Weight) -> int:
        copies = self.gradient_copies * weight.nbytes
        if self.masters and weight.nbytes < _WIDE * weight.num_elements:
            return (self.states + 1) * _WIDE * weight.num_elements + copies
        return self.states * weight.nbytes + copies
