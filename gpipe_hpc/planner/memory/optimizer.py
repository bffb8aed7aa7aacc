"""Memory model of an optimizer and of a rank's process."""

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from gpipe_hpc.comm.collectives.packed import PACK
from gpipe_hpc.planner.costs.layer_trial import LayerWeight

_WIDE: Final = 4  # bytes of a float32


class OptimizerMemory(NamedTuple):
    """Memory that an optimizer and the process of a rank need in addition to weights.

    Attributes:
      states: number of values per trained parameter element, in its dtype unless it has a master
        copy.
      masters: whether parameters narrower than float32 have a float32 master copy and float32
        states.
      gradient_copies: number of additional copies of each trained parameter's gradient.
      outer_states: values per element, at least float32, for compressing the gradients of replicas
        (residuals).
      local_sgd_states: values per element, at least float32, for replicas that train separately
        between synchronisations (anchors, outer momenta, averages in flight).
      process_bytes: memory of a rank's process besides tensors, on the device or host that stores
        the tensors: interpreter, libraries and communicators on the host, contexts on a device; 0
        if not measured.
      temporaries: number of temporary tensors of an optimizer step, for one weight at a time on the
        host, for one group of weights on a device.
      of_all_on_device: number of temporaries per weight if a step on a device handles all weights
        at once.
      is_on_device: whether tensors are in device memory.
      saves_in_background: whether checkpoints are copied to the host before writing.
      copies_to_neighbours: whether hosts keep in-memory copies of the state of other ranks.
      replicas: number of replicas among which writing a checkpoint is divided.
    """

    states: int
    masters: bool = False
    gradient_copies: int = 0
    outer_states: int = 0
    local_sgd_states: float = 0
    process_bytes: int = 0
    temporaries: int = 0
    of_all_on_device: int | None = None
    is_on_device: bool = False
    saves_in_background: bool = False
    copies_to_neighbours: bool = False
    replicas: int = 1

    @classmethod
    def of(cls, given: "int | OptimizerMemory") -> "OptimizerMemory":
        """Convert a number of states to an OptimizerMemory without master copies."""
        return given if isinstance(given, OptimizerMemory) else cls(given)

    def among(self, copies: int) -> "OptimizerMemory":
        """Return the memory model for weights that have `copies` replicas.

        A single replica needs no outer states.
        """
        return self._replace(
            outer_states=self.outer_states if copies > 1 else 0,
            local_sgd_states=self.local_sgd_states if self.replicas > 1 else 0,
        )

    def of_weights(self, weights: Iterable[LayerWeight]) -> int:
        """Return the bytes of optimizer state for these weights; frozen weights need none."""
        trained = [weight for weight in weights if weight.is_trained and weight.num_elements]
        states = sum(self.of_elements(w.num_elements, w.nbytes // w.num_elements) for w in trained)
        return states + self.copies_of(trained)

    def copies_of(self, weights: Iterable[LayerWeight]) -> int:
        """Return the bytes that are never sharded: gradient copies and outer states."""
        trained = [weight for weight in weights if weight.is_trained]
        wide = sum(max(w.nbytes, _WIDE * w.num_elements) for w in trained)
        gradients = self.gradient_copies * sum(w.nbytes for w in trained)
        return gradients + round((self.outer_states + self.local_sgd_states) * wide)

    def of_elements(self, count: int, size: int) -> int:
        """Return the bytes of states and masters for `count` elements of `size` bytes."""
        if self.masters and size < _WIDE:
            return (self.states + 1) * _WIDE * count
        return self.states * size * count

    def update_of(self, weights: Iterable[LayerWeight], share: float = 1.0) -> int:
        """Return the peak temporary bytes of an optimizer step on a `share` of the weights.

        Weights with master copies also need their complete gradient in float32.
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

    def saving_of(self, weights: Sequence[LayerWeight], copies: int, optimizer_bytes: int) -> int:
        """Return the bytes of permanent host buffers for saving checkpoints.

        Args:
          copies: number of replicas of these weights over all ranks.
          optimizer_bytes: bytes of optimizer state on this rank.
        """
        in_background = self._written(weights, copies) if self.saves_in_background else 0
        to_neighbours = self.state_of(weights, optimizer_bytes) if self.copies_to_neighbours else 0
        return in_background + to_neighbours

    def state_of(self, weights: Iterable[LayerWeight], optimizer_bytes: int) -> int:
        """Return the bytes of a rank's state that another host keeps as an in-memory checkpoint."""
        own = list(weights)
        gradients = self.gradient_copies * sum(w.nbytes for w in own if w.is_trained)
        return sum(weight.nbytes for weight in own) + optimizer_bytes - gradients

    def _written(self, weights: Sequence[LayerWeight], copies: int) -> int:
        """Return the bytes that the first of `copies` replicas writes to a checkpoint."""
        trained = [weight for weight in weights if weight.is_trained]
        sizes = [weight.nbytes for weight in weights]
        for weight in trained:
            num = self.states + self._has_master(weight)
            sizes += num * [weight.num_elements * self._width(weight)]
        kept = math.ceil(self.outer_states + self.local_sgd_states)
        sizes += [max(w.nbytes, _WIDE * w.num_elements) for w in trained] * kept
        load = [0] * copies
        for size in sizes:
            load[load.index(min(load))] += size
        return load[0]

    def _width(self, weight: LayerWeight) -> int:
        own = weight.nbytes // max(1, weight.num_elements)
        return max(own, _WIDE) if self.masters else own

    def _has_master(self, weight: LayerWeight) -> bool:
        return self.masters and weight.nbytes < _WIDE * weight.num_elements
