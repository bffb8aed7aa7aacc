"""Checks of a stage's parameters: none is added, and no write makes copies differ.

A pipeline makes its buckets of gradients from the parameters that layers have when it is made. A
parameter that is added later would not be cleared, summed or saved, so the next step refuses it.

A forward may write into a parameter: clamp it, or normalise it. If several ranks hold copies, they
have to write the same whatever micro-batches they run. nn.Embedding with max_norm does not: it
writes the rows that its rank sees. Nor does a teacher that follows its student with each
micro-batch: each rank runs some of them only. Both are refused before the optimizer's update.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

import torch
from torch import nn

from gpipe_hpc.comm.collectives.group import ControlGroup
from gpipe_hpc.device.device import Device, on_host
from gpipe_hpc.engine.sketch import Sketch, difference, sketch_of
from gpipe_hpc.errors import ModelError

_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FIRST, _EVERY = 2, 100  # steps in which values are compared
_FEW: Final = 2  # forwards and recomputations of such a step that compare all parameters
_PIECE: Final = 2**16  # elements that are compared at once, which bounds the memory for it
_DEVICE_PIECE: Final = 2**20  # likewise on an accelerator, where each piece takes some kernels

_Spans = dict[str, tuple[int, int]]
"""By name the least and the greatest sum of bits of a parameter on some ranks."""


class StageParameters:
    """Compares the parameters of a stage with their state at the begin of a step.

    `named`: by global name, as the pipeline was made with them. Versions are compared in every
    step. Values are compared in steps 1 to 3, in every hundredth, and in the step after one that
    gave a parameter other memory or was the first to write into it; on an accelerator, where the
    host waits for it, not in steps 2, 3 and every hundredth. Values of all parameters are compared
    around the first two forwards and recomputations of a step, those of written ones around each.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        named: Mapping[str, nn.Parameter],
        device: Device,
    ) -> None:
        self._layers, self._named = layers, dict(named)
        self._classed = [(name, p, _is_plain(p)) for name, p in named.items()]
        self._copied: dict[str, nn.Parameter] = {}
        self._known = {id(parameter) for parameter in self._named.values()}
        self._is_accelerator = device.is_accelerator
        self._look_around()
        self._num_steps = 0
        self.compares_values = False  # in the present step
        self.has_other_memory = False  # a copied parameter got another tensor in the last step
        self._begun = self._writes()
        self._bits: dict[str, torch.Tensor] = {}  # when the step began, if values are compared
        self._by_forward: dict[str, Sketch] = {}  # what the first forward of the step wrote
        self._num_forwards = self._num_again = 0  # in the present step, if values are compared
        self._compared: set[str] = set()  # written in steps in which values were compared
        self._is_suspected = False  # another parameter was written
        self._moves_on: str | None = None  # by each forward
        self.written: dict[str, str] = {}
        """Copied parameters that were written since copies were last compared, and when."""

    def watch_copied(self, names: Collection[str]) -> None:
        """Detect writes into these parameters from now on: other ranks have copies of them."""
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

    def begin(self, *, may_arrive: bool = False) -> None:
        """Note versions, memory and maybe values of the parameters before a step or an evaluation.

        `may_arrive`: values that other ranks have updated may not be here yet.
        """
        number, self._begun = self._num_steps, self._writes()
        is_due = not number or (
            not self._is_accelerator and (number < _FIRST or number % _EVERY == 0)
        )
        self.compares_values = is_due or self._is_suspected or self.has_other_memory
        self._bits = _bits(self._named) if self.compares_values and not may_arrive else {}
        self._by_forward = {}
        self._num_forwards = self._num_again = 0

    def note_forward(self) -> None:
        """Note which parameters a forward has written, if values are compared in this step.

        Forwards that follow have to write the same into copied parameters.
        """
        self._num_forwards += 1
        changed = self._changed(self._named, by_value=self._num_forwards <= _FEW)
        self._compared.update(changed)
        for name in (name for name in self._copied if name in changed):
            sketch = _sketch(self._named[name])
            if difference(self._by_forward.setdefault(name, sketch), sketch):
                self._moves_on = self._moves_on or name

    def end(self, *, trains: bool) -> None:
        """Note which copied parameters a step or an evaluation has written.

        Raises ModelError if each forward of a step has written something else. What all have
        written alike, `refuse_different` compares.
        """
        # Some layers make parameters in their first forward.
        if trains and self._num_steps < _FIRST and self._ids_now() != self._ids:
            self._refuse_new()
        self._num_steps += trains
        changed = self._changed(self._copied) if self._copied else set()
        self._bits, self._by_forward = {}, {}  # which may take memory of a device
        if not self._copied:
            return
        self.written |= dict.fromkeys(
            changed.difference(self.written), "a step" if trains else "an evaluation"
        )
        # RNNs on a GPU move their weights to other memory: that alone is no harm.
        memory = {name: p.data_ptr() for name, p in self._copied.items() if _is_plain(p)}
        self.has_other_memory = any(memory[name] != self._begun[name][1] for name in memory)
        self._is_suspected = not changed <= self._compared
        if self._moves_on is not None:
            raise _refusal(self._moves_on, "a step", "to other values with each micro-batch")

    def _changed(self, named: Mapping[str, nn.Parameter], *, by_value: bool = True) -> set[str]:
        """Return which of these were written since `begin`: by version, and value if compared."""
        begun = self._begun
        found = {name for name, p in named.items() if p._version != begun[name][0]}
        if self._bits and by_value:
            found |= _differing(_bits(named), self._bits)
        return found

    @contextmanager
    def unchanged(self, where: str) -> Iterator[None]:
        """Raise ModelError if the block, a recomputation, changes values beyond rounding.

        What a forward wrote and writes again is no harm if it is the same.
        """
        self._num_again += 1
        bits = _bits(self._named) if self._bits and self._num_again <= _FEW else {}
        # Sketches only of what forwards have written: those of all parameters would take memory.
        written = _differing(bits, self._bits) | self._compared
        written |= {name for name, write in self._writes().items() if write != self._begun[name]}
        before = {name: _sketch(self._named[name]) for name in sorted(written)}
        yield
        changed = {n for n, then in before.items() if difference(_sketch(self._named[n]), then)}
        if bits:
            changed |= _differing(_bits(self._named), bits) - written
        if changed:
            first = next(name for name in self._named if name in changed)
            raise ModelError(
                f"{where}: parameter {first} was changed when the layers were run again, "
                f"expected to stay, as each micro-batch changes it once without recomputation; "
                f"keep in a buffer what a forward changes, or use recompute=never"
            )

    def _writes(self) -> dict[str, tuple[int, int]]:
        """Return version and address of each parameter, by name."""
        return {
            name: (p._version, p.data_ptr() if is_plain else 0)
            for name, p, is_plain in self._classed
        }

    def spans(self, names: Collection[str]) -> _Spans:
        """Return the sums of bits of those of these parameters that are copied."""
        bits = _bits({name: p for name, p in self._copied.items() if name in names})
        return {name: (int(total), int(total)) for name, total in bits.items()}


def refuse_different(
    stages: Sequence[StageParameters], together: ControlGroup, everybody: ControlGroup
) -> None:
    """Raise ModelError, on all ranks, if copies of a written parameter have different values.

    All ranks call it if one of them has written. `together`: those that may hold copies of this
    rank's parameters.
    """
    own: dict[str, str] = {}
    for stage in stages:
        own |= stage.written
        stage.written = {}
    written = together.merge_object(own, _united)
    spans: _Spans = {}
    for stage in stages:
        spans = _widest(spans, stage.spans(written))
    widest = together.merge_object(spans, _widest).items()
    different = sorted((name, written[name]) for name, (least, most) in widest if least != most)
    if together is not everybody:
        different = everybody.merge_object(different, max)
    if different:
        raise _refusal(*different[0], "to other values than on other ranks")


def _refusal(name: str, during: str, how: str) -> ModelError:
    return ModelError(
        f"{name}: was changed within {during} by a forward (nn.Embedding with max_norm does so) or "
        f"a hook {how}, expected the same values on all ranks that hold copies of it: these see "
        f"other micro-batches and would drift apart; change it after optimizer.step() (as rows to "
        f"be renormalised), keep in a buffer what forwards change, or train one copy (one replica, "
        f"no mirrored schedule, layers that share it in one stage)"
    )


def _united(ahead: dict[str, str], behind: dict[str, str]) -> dict[str, str]:
    return behind | ahead


def _widest(ahead: _Spans, behind: _Spans) -> _Spans:
    both = [(name, span) for spans in (ahead, behind) for name, span in spans.items()]
    found: _Spans = {}
    for name, (least, most) in both:
        known = found.get(name, (least, most))
        found[name] = min(known[0], least), max(known[1], most)
    return found


def _sketch(parameter: nn.Parameter) -> Sketch:
    return sketch_of(list(_pieces(parameter.detach()))) if _is_plain(parameter) else ()


def _bits(named: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return by name int64[], a sum of bits: values that change places leave it as it is."""
    with torch.no_grad():
        return {name: _sum_of_bits(p) for name, p in named.items() if _is_plain(p)}


def _differing(bits: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> set[str]:
    return {n for n, own in bits.items() if n in others and not torch.equal(own, others[n])}


def _sum_of_bits(parameter: nn.Parameter) -> torch.Tensor:
    values = parameter.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    # Integers, so that sums are the same in any order of adding; what overflows is dropped.
    sums = [_words(piece).sum(dtype=torch.int64) for piece in _pieces(values)]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _words(piece: torch.Tensor) -> torch.Tensor:
    """Return the bits as integers; as int64 if possible, which a sum need not convert."""
    size = piece.itemsize
    whole = not (piece.numel() * size % 8 or piece.storage_offset() * size % 8)
    return piece.view(torch.int64 if whole and piece.numel() else _WORDS[size])


def _pieces(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(values.reshape(-1), _PIECE if on_host(values) else _DEVICE_PIECE)


def _is_plain(parameter: nn.Parameter) -> bool:
    return type(parameter) is nn.Parameter and parameter.layout is torch.strided
