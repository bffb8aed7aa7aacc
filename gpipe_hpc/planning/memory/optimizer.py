"""What an optimizer keeps beside the weights, and a process beside all tensors."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from gpipe_hpc.planning.costs.trial import Weight

_WIDE: Final = 4  # bytes of a float32


class OptimizerMemory(NamedTuple):
    """`states`: numbers of a trained parameter, of its own size unless it has a master.

    `masters`: parameters smaller than float32 have one, of float32, and their states are so too.
    `gradient_copies`: of each trained parameter's gradient. `outer_states`: numbers of a trained
    parameter, of float32 or wider, for combining replicas: residuals, anchors, outer momenta.
    `process_bytes`: of a rank, whatever it trains: interpreter, libraries, communicators; 0 where
    nobody measured them.
    """

    states: int
    masters: bool = False
    gradient_copies: int = 0
    outer_states: int = 0
    process_bytes: int = 0

    @classmethod
    def of(cls, given: "int | OptimizerMemory") -> "OptimizerMemory":
        """Take a number of states without masters, as torch's optimizers keep them."""
        return given if isinstance(given, OptimizerMemory) else cls(given)

    def of_weights(self, weights: Iterable[Weight]) -> int:
        """Return the bytes for these weights; frozen ones need none."""
        trained = [weight for weight in weights if weight.is_trained and weight.num_elements]
        states = sum(self.of_elements(w.num_elements, w.nbytes // w.num_elements) for w in trained)
        return states + self.copies_of(trained)

    def copies_of(self, weights: Iterable[Weight]) -> int:
        """Return the bytes of what is whole on each copy: gradients, and what combining keeps."""
        trained = [weight for weight in weights if weight.is_trained]
        wide = sum(max(w.nbytes, _WIDE * w.num_elements) for w in trained)
        return self.gradient_copies * sum(w.nbytes for w in trained) + self.outer_states * wide

    def of_elements(self, count: int, size: int) -> int:
        """Return the bytes of the states, and masters, of so many trained numbers of a size."""
        if self.masters and size < _WIDE:
            return (self.states + 1) * _WIDE * count
        return self.states * size * count
