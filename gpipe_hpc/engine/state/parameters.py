"""The parameters of one stage between steps and within them: the same ones, and left alone.

A pipeline makes its buckets of gradients from the parameters that layers have when it is made. One
that is added later is cleared, summed and saved by nobody, so it is refused when the next step
begins. A parameter that a forward writes into (nn.Embedding with max_norm, a teacher that follows)
has other values on each copy of its stage, as each copy sees other micro-batches, and nobody would
make them equal again; so that is refused where there are several copies. What a recomputation
writes is looked at in `unchanged`.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

import torch
from torch import nn

from gpipe_hpc.comm.device import Device
from gpipe_hpc.engine.state.sketch import Sketch, difference, sketch_of
from gpipe_hpc.errors import ModelError

_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FIRST, _EVERY = 3, 100  # steps in which values are compared
_PIECE: Final = 2**16  # elements that are looked at at once: what that takes is no larger


class StageParameters:
    """Watches over the parameters of a stage.

    `named`: by global name, as the pipeline was made with them. Versions are compared in every
    step; values in steps 1 to 3 and in every hundredth, and behind a step in which a parameter got
    other memory. On an accelerator, which the host waits for, in the first alone.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        named: Mapping[str, nn.Parameter],
        device: Device,
    ) -> None:
        self._layers, self._named = layers, dict(named)
        self._copied: dict[str, nn.Parameter] = {}
        self._known = {id(parameter) for parameter in self._named.values()}
        self._is_accelerator = device.is_accelerator
        self._look_around()
        self._num_steps = 0
        self._has_other_memory = False  # since the last step: another tensor was put there
        self._versions: list[int] = []
        self._begun = self._writes()
        self._memory: list[int] = []
        self._bits: list[torch.Tensor] = []
        self._found: tuple[str, str] | None = None  # changed outside of training

    def watch_copied(self, names: Collection[str]) -> None:
        """Refuse changes of these from now on: other ranks hold them too."""
        self._copied = {name: p for name, p in self._named.items() if name in names}

    def _look_around(self) -> None:
        modules = [module for layer in self._layers.values() for module in layer.modules()]
        # The dicts themselves: to walk all modules takes as long as a small layer.
        self._homes: list[dict[str, Any]] = [m._parameters for m in modules]
        self._homes += [m._modules for m in modules]
        self._ids = self._ids_now()

    def _ids_now(self) -> list[int]:
        return [*map(id, chain.from_iterable(map(dict.values, self._homes)))]

    def refuse_others(self) -> bool:
        """Raise ModelError for a parameter that the pipeline was not made with.

        Returns whether there are other modules than before.
        """
        if self._ids_now() == self._ids:
            return False
        self._refuse_new()
        self._look_around()
        return True

    def _refuse_new(self) -> None:
        new = [
            f"layers.{index}.{name}"
            for index, layer in self._layers.items()
            for name, parameter in layer.named_parameters()
            if id(parameter) not in self._known
        ]
        if new:
            what = "another one in its place" if new[0] in self._named else "a new one"
            raise ModelError(
                f"{new[0]}: expected the parameters that layers had when Pipeline was made, got "
                f"{what} ({len(new)} in all on this stage), whose gradient would not be cleared, "
                f"summed over replicas or saved; add it before Pipeline is made (frozen until it "
                f"is used), copy values into the parameter that is there, or save, make a new "
                f"Pipeline and load"
            )

    @property
    def compares_values(self) -> bool:
        """Say whether this step looks at values, which takes longer than looking at versions."""
        if self._is_accelerator:
            return self._num_steps == 0 or self._has_other_memory
        return self._has_other_memory or self._num_steps < _FIRST or self._num_steps % _EVERY == 0

    def begin(self, *, may_arrive: bool = False) -> None:
        """Note what copied parameters are like ahead of a step's forwards, or an evaluation's.

        `may_arrive`: values that other ranks have updated may still be on their way.
        """
        self._begun = self._writes()
        if not self._copied:
            return
        copied, compares = self._copied.values(), self.compares_values and not may_arrive
        self._versions, self._memory = _versions(copied), _memory(copied)
        self._bits = _bits(copied) if compares else []

    def end(self, *, trains: bool) -> None:
        """Raise ModelError for a copied parameter that has changed since.

        After an evaluation nothing is raised: its outputs are right. Training is then refused.
        """
        # Some layers make parameters in their first forward.
        if trains and self._num_steps < _FIRST and self._ids_now() != self._ids:
            self._refuse_new()
        changed = self._changed() if self._copied else None
        if changed is not None and self._found is None:
            self._found = changed, "a step" if trains else "an evaluation"
        self._num_steps += trains
        if trains and self._found is not None:
            name, during = self._found
            raise ModelError(
                f"{name}: was changed within {during} by a forward (nn.Embedding with max_norm "
                f"does so) or a hook, expected to be changed by the optimizer alone, as several "
                f"ranks hold copies of it, which see other micro-batches and would drift apart; "
                f"change it after optimizer.step() (as rows to be renormalised), keep in a buffer "
                f"what forwards change, or train one copy (one replica, no mirrored schedule)"
            )

    def _changed(self) -> str | None:
        after = _versions(self._copied.values())
        # RNNs on a GPU move their weights to other memory: that alone is no harm.
        self._has_other_memory = _memory(self._copied.values()) != self._memory
        if after != self._versions:
            pairs = zip(self._copied, after, self._versions, strict=True)
            return next(name for name, now, before in pairs if now != before)
        if self._bits:
            bits = zip(self._copied, _bits(self._copied.values()), self._bits, strict=True)
            return next((n for n, now, before in bits if not torch.equal(now, before)), None)
        return None

    @contextmanager
    def unchanged(self, where: str) -> Iterator[None]:
        """Refuse a change of values within the block, a recomputation, beyond rounding.

        What a forward wrote and writes again is no harm if it is the same.
        """
        # Only of what the step's forwards have written to: those of all would take memory.
        writes = zip(self._named.items(), self._writes(), self._begun, strict=True)
        written = {n: p for (n, p), now, begun in writes if now != begun and _is_plain(p)}
        before = _sketches(written.values())
        yield
        pairs = zip(written, _sketches(written.values()), before, strict=True)
        changed = next((name for name, now, then in pairs if difference(now, then)), None)
        if changed is not None:
            raise ModelError(
                f"{where}: parameter {changed} was changed when the layers were run again, "
                f"expected to stay, as each micro-batch changes it once without recomputation; "
                f"keep in a buffer what a forward changes, or use recompute=never"
            )

    def _writes(self) -> list[tuple[int, int]]:
        """Return what changes if a parameter is written to, or is given other memory."""
        named = self._named.values()
        return list(zip(_versions(named), _memory(named), strict=True))


def _sketches(parameters: Collection[nn.Parameter]) -> list[Sketch]:
    return [sketch_of(list(_pieces(parameter.detach()))) for parameter in parameters]


def _versions(parameters: Collection[nn.Parameter]) -> list[int]:
    return [parameter._version for parameter in parameters]


def _memory(parameters: Collection[nn.Parameter]) -> list[int]:
    return [p.data_ptr() if _is_plain(p) else 0 for p in parameters]


def _bits(parameters: Collection[nn.Parameter]) -> list[torch.Tensor]:
    """Return sums of the bits of parameters: the same in any order of adding, NaNs included."""
    with torch.no_grad():
        return [_sum_of_bits(parameter) for parameter in parameters]


def _sum_of_bits(parameter: nn.Parameter) -> torch.Tensor:
    if not _is_plain(parameter):
        return torch.zeros((), dtype=torch.int64)
    values = parameter.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    words = (piece.view(_WORDS[values.dtype.itemsize]) for piece in _pieces(values))
    return torch.stack([each.sum(dtype=torch.int64) for each in words]).sum()


def _pieces(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(values.reshape(-1), _PIECE)


def _is_plain(parameter: nn.Parameter) -> bool:
    return type(parameter) is nn.Parameter and parameter.layout is torch.strided
