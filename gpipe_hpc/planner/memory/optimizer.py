"""What an optimizer keeps beside the weights, and a process beside all tensors."""

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from gpipe_hpc.comm.collectives.packed import PACK
from gpipe_hpc.planner.costs.trial import Weight

_WIDE: Final = 4  # bytes of a float32


class OptimizerMemory(NamedTuple):
    """`states`: numbers of a trained parameter, of its own size unless it has a master.

    `masters`: parameters smaller than float32 have one, of float32, and their states are so too.
    `gradient_copies`: of each trained parameter's gradient. `outer_states`, `apart_states`: numbers
    of a trained parameter, of float32 or wider: residuals for combining copies; anchors, outer
    momenta and averages under way of replicas that train apart; where there are several (`among`).
    `process_bytes`: of a rank, whatever it trains, of the memory that its tensors lie in: on the
    host interpreter, libraries and communicators, on a device its contexts; 0 where nobody measured
    them.

    `temporaries`: tensors that a step makes of each weight that it has in hand: on the host one by
    one, on a device packs of them. `of_all_on_device`: where a step there takes all weights at
    once, how many it makes of each then. `is_on_device`: tensors lie
    in the memory of a device. `saves_in_background`: what a checkpoint writes is copied to the host
    first. `copies_to_neighbours`: a rank's state is, and kept in the memory of hosts. `replicas`:
    among which what a checkpoint writes is divided.
    """

    states: int
    masters: bool = False
    gradient_copies: int = 0
    outer_states: int = 0
    apart_states: float = 0
    process_bytes: int = 0
    temporaries: int = 0
    of_all_on_device: int | None = None
    is_on_device: bool = False
    saves_in_background: bool = False
    copies_to_neighbours: bool = False
    replicas: int = 1

    @classmethod
    def of(cls, given: "int | OptimizerMemory") -> "OptimizerMemory":
        """Take a number of states without masters, as torch's optimizers keep them."""
        return given if isinstance(given, OptimizerMemory) else cls(given)

    def among(self, copies: int) -> "OptimizerMemory":
        """Return the same for so many copies of a weight: one alone is combined with none."""
        return self._replace(
            outer_states=self.outer_states if copies > 1 else 0,
            apart_states=self.apart_states if self.replicas > 1 else 0,
        )

    def of_weights(self, weights: Iterable[Weight]) -> int:
        """Return the bytes for these weights; frozen ones need none."""
        trained = [weight for weight in weights if weight.is_trained and weight.num_elements]
        states = sum(self.of_elements(w.num_elements, w.nbytes // w.num_elements) for w in trained)
        return states + self.copies_of(trained)

    def copies_of(self, weights: Iterable[Weight]) -> int:
        """Return the bytes of what is whole on each copy: gradients, and what combining keeps."""
        trained = [weight for weight in weights if weight.is_trained]
        wide = sum(max(w.nbytes, _WIDE * w.num_elements) for w in trained)
        gradients = self.gradient_copies * sum(w.nbytes for w in trained)
        return gradients + round((self.outer_states + self.apart_states) * wide)

    def of_elements(self, count: int, size: int) -> int:
        """Return the bytes of the states, and masters, of so many trained numbers of a size."""
        if self.masters and size < _WIDE:
            return (self.states + 1) * _WIDE * count
        return self.states * size * count

    def update_of(self, weights: Iterable[Weight], share: float = 1.0) -> int:
        """Return the bytes that a step holds while it runs; `share`: of the weights it updates.

        Weights with masters have their whole gradients in float32 meanwhile.
        """
        trained = [weight for weight in weights if weight.is_trained and weight.num_elements]
        sizes = [weight.num_elements * self._width(weight) for weight in trained]
        made = self.temporaries * max(sizes, default=0)
        if self.is_on_device and self.of_all_on_device is not None:
            made = round(self.of_all_on_device * sum(sizes) * share)
        elif self.is_on_device:
            most = max(*sizes, PACK * _WIDE) if sizes else 0
            made = self.temporaries * min(most, sum(sizes))
        low = sum(w.num_elements for w in trained if self._has_master(w))
        return made + round(_WIDE * low * share)

    def saving_of(self, weights: Sequence[Weight], copies: int, optimizer_bytes: int) -> int:
        """Return the bytes of buffers on the host that hold what is saved; they stay.

        `copies`: of these weights over all ranks. `optimizer_bytes`: what this rank keeps.
        """
        in_background = self._written(weights, copies) if self.saves_in_background else 0
        to_neighbours = self.state_of(weights, optimizer_bytes) if self.copies_to_neighbours else 0
        return in_background + to_neighbours

    def state_of(self, weights: Iterable[Weight], optimizer_bytes: int) -> int:
        """Return the bytes of a rank's state, as a neighbour keeps it."""
        own = list(weights)
        gradients = self.gradient_copies * sum(w.nbytes for w in own if w.is_trained)
        return sum(weight.nbytes for weight in own) + optimizer_bytes - gradients

    def _written(self, weights: Sequence[Weight], copies: int) -> int:
        """Return what the first of copies writes: each tensor goes to that with least so far."""
        trained = [weight for weight in weights if weight.is_trained]
        sizes = [weight.nbytes for weight in weights]
        for weight in trained:
            num = self.states + self._has_master(weight)
            sizes += num * [weight.num_elements * self._width(weight)]
        kept = math.ceil(self.outer_states + self.apart_states)
        sizes += [max(w.nbytes, _WIDE * w.num_elements) for w in trained] * kept
        load = [0] * copies
        for size in sizes:
            load[load.index(min(load))] += size
        return load[0]

    def _width(self, weight: Weight) -> int:
        own = weight.nbytes // max(1, weight.num_elements)
        return max(own, _WIDE) if self.masters else own

    def _has_master(self, weight: Weight) -> bool:
        return self.masters and weight.nbytes < _WIDE * weight.num_elements
