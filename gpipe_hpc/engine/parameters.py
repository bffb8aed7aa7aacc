"""Checks of a stage's parameters: none is added, all ranks train the same, no copies differ.

A pipeline builds its gradient buckets from the parameters that its layers have when it is created.
A parameter that is added later would not be cleared, reduced or saved, so the next step raises.

Reductions between copies of a stage have the size of the trained parameters. A copy with more
frozen parameters would send less, and Gloo aborts a process that receives more than it expects. So
all ranks agree on the trained parameters, and agree again after a rank has changed one.

A forward may write into a parameter: clamp it, or normalise it. If several ranks hold copies, each
must write the same values, whichever micro-batches it runs. nn.Embedding with max_norm does not: it
writes the rows that its own rank reads. Nor does a teacher model that follows its student with
each micro-batch, because each rank runs only some of them. Both raise before the optimizer's step.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

import torch
from torch import nn

from gpipe_hpc.comm.collectives.group import ControlGroup
from gpipe_hpc.device.device import Device, on_host
from gpipe_hpc.errors import ModelError
from gpipe_hpc.pytree import Nest, tensors_of

log = logging.getLogger("gpipe_hpc.pipeline")

_CLASSES: Final = 64
_NARROW: Final = (torch.float32, torch.bfloat16, torch.float16)
_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FIRST, _EVERY = 2, 100  # steps in which values are compared
_FEW: Final = 2  # forwards and recomputations of such a step that compare all parameters
_PIECE: Final = 2**16  # elements that are compared at once, which bounds the memory for it
_DEVICE_PIECE: Final = 2**20  # likewise on an accelerator, where each piece takes some kernels

_Spans = dict[str, tuple[int, int]]
"""By name the least and the greatest sum of bits of a parameter on some ranks."""

Sketch = tuple[tuple[torch.Tensor, float], ...]
"""For each tensor its sums, and the relative difference that rounding may cause."""


class StageParameters:
    """Compares the parameters of a stage with their state at the beginning of a step.

    Versions are compared in every step. Values are compared in the first steps, in every hundredth,
    and in the step after one that gave a parameter other memory or was the first to write into it;
    on an accelerator, where the host waits for the comparison, only in the first step and the last
    two cases. In such a step, values of all parameters are compared around the first two forwards
    and recomputations, those of written parameters around each.

    Args:
        layers: The layers of the stage by global index.
        named: The parameters with which the pipeline was created, by global name.
        device: Where the stage runs.
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
        self._moves_on: str | None = None  # a parameter to which forwards wrote different values
        self.written: dict[str, str] = {}
        """Copied parameters that were written since copies were last compared, by name.

        The values say when: in a step or an evaluation.
        """

    def watch_copied(self, names: Collection[str]) -> None:
        """Detect writes into these parameters, of which other ranks hold copies, from now on."""
        self._copied = {name: p for name, p in self._named.items() if name in names}

    def _look_around(self) -> None:
        modules = [module for layer in self._layers.values() for module in layer.modules()]
        # The dicts themselves, as walking all modules takes as long as running a small layer.
        self._homes: list[dict[str, Any]] = [m._parameters for m in modules]
        self._homes += [m._modules for m in modules]
        self._ids = self._ids_now()

    def _ids_now(self) -> list[int]:
        return [*map(id, chain.from_iterable(map(dict.values, self._homes)))]

    def refuse_others(self) -> bool:
        """Raise ModelError for a parameter that was added after the pipeline was created.

        Return whether modules have changed since the last call.
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
            what = "was replaced" if new[0] in self._named else "was added"
            raise ModelError(
                f"{new[0]}: the parameter {what} after Pipeline was created ({len(new)} in all on "
                f"this stage), so its gradient would not be cleared, summed over replicas or "
                f"saved; add it before Pipeline is created (frozen until it is used), copy values "
                f"into the existing parameter, or save, create a new Pipeline and load"
            )

    def begin(self, *, may_arrive: bool = False) -> None:
        """Store versions, and values if they are compared, before a step or an evaluation.

        `may_arrive`: values that other ranks have updated may still be in transfer.
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
        """Store which parameters a forward has written, in a step in which values are compared.

        Later forwards of the step must write the same values into copied parameters.
        """
        self._num_forwards += 1
        changed = self._changed(self._named, by_value=self._num_forwards <= _FEW)
        self._compared.update(changed)
        for name in (name for name in self._copied if name in changed):
            sketch = _sketch(self._named[name])
            if difference(self._by_forward.setdefault(name, sketch), sketch):
                self._moves_on = self._moves_on or name

    def end(self, *, trains: bool) -> None:
        """Store which copied parameters a step or an evaluation has written.

        Raises ModelError if forwards of a step have written different values. If all forwards of
        this rank have written the same, `refuse_different` compares the ranks.
        """
        # Some layers create parameters in their first forward.
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
        # RNNs on a GPU move their weights to other memory, which is harmless by itself.
        memory = {name: p.data_ptr() for name, p in self._copied.items() if _is_plain(p)}
        self.has_other_memory = any(memory[name] != self._begun[name][1] for name in memory)
        self._is_suspected = not changed <= self._compared
        if self._moves_on is not None:
            raise _refusal(self._moves_on, "a step", "to other values in each micro-batch")

    def _changed(self, named: Mapping[str, nn.Parameter], *, by_value: bool = True) -> set[str]:
        """Return the names of parameters in `named` that were written since `begin`.

        `by_value`: compare values besides versions, if they are stored.
        """
        begun = self._begun
        found = {name for name, p in named.items() if p._version != begun[name][0]}
        if self._bits and by_value:
            found |= _differing(_bits(named), self._bits)
        return found

    @contextmanager
    def unchanged(self, where: str) -> Iterator[None]:
        """Return a block for a recomputation; ModelError if it changes values beyond rounding.

        Writing the same values as the forward did is allowed.
        """
        self._num_again += 1
        bits = _bits(self._named) if self._bits and self._num_again <= _FEW else {}
        # Sketches only of written parameters, as those of all parameters would take memory.
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
                f"{where}: recomputation changed parameter {first} again, but without "
                f"recomputation each micro-batch changes it only once; keep values that a "
                f"forward changes in a buffer, or use recompute=never"
            )

    def _writes(self) -> dict[str, tuple[int, int]]:
        """Return version and address of each parameter, by name."""
        return {
            name: (p._version, p.data_ptr() if is_plain else 0)
            for name, p, is_plain in self._classed
        }

    def spans(self, names: Collection[str]) -> _Spans:
        """Return the sum of bits of each copied parameter in `names`, as least and greatest sum."""
        bits = _bits({name: p for name, p in self._copied.items() if name in names})
        return {name: (int(total), int(total)) for name, total in bits.items()}


def refuse_different(
    stages: Sequence[StageParameters], together: ControlGroup, world_group: ControlGroup
) -> None:
    """Raise ModelError, on all ranks, if copies of a written parameter have different values.

    A collective call, after any rank has written. `together`: the ranks that may hold copies of
    this rank's parameters.
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
    if together is not world_group:
        different = world_group.merge_object(different, max)
    if different:
        raise _refusal(*different[0], "to values that differ from those on other ranks")


def _refusal(name: str, during: str, how: str) -> ModelError:
    return ModelError(
        f"{name}: changed within {during} by a forward (nn.Embedding with max_norm does so) or a "
        f"hook, {how}. Ranks that hold copies of it see other micro-batches, so the copies would "
        f"diverge; change it after optimizer.step() (for example, renormalise rows there), keep "
        f"values that forwards change in a buffer, or train one copy (one replica, no mirrored "
        f"schedule, layers that share it in one stage)"
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
    """Return for each parameter the sum of its bits, int64[]; it ignores the order of elements."""
    with torch.no_grad():
        return {name: _sum_of_bits(p) for name, p in named.items() if _is_plain(p)}


def _differing(bits: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> set[str]:
    return {n for n, own in bits.items() if n in others and not torch.equal(own, others[n])}


def _sum_of_bits(parameter: nn.Parameter) -> torch.Tensor:
    values = parameter.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    # Integers, so that the sum does not depend on the order of adding; overflow wraps around.
    sums = [_words(piece).sum(dtype=torch.int64) for piece in _pieces(values)]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _words(piece: torch.Tensor) -> torch.Tensor:
    """Return the bits as integers; as int64 if possible, which `sum` need not convert."""
    size = piece.itemsize
    whole = not (piece.numel() * size % 8 or piece.storage_offset() * size % 8)
    return piece.view(torch.int64 if whole and piece.numel() else _WORDS[size])


def _pieces(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(values.reshape(-1), _PIECE if on_host(values) else _DEVICE_PIECE)


def _is_plain(parameter: nn.Parameter) -> bool:
    return type(parameter) is nn.Parameter and parameter.layout is torch.strided


def sketch_of(nest: Nest) -> Sketch:
    """Return a sketch of a nest's tensors: a few numbers by which it is compared with another.

    For each tensor these are 64 sums of its elements with random signs. The length of the
    difference of two sketches is close to that of the difference of the tensors. Source: Charikar,
    Chen, Farach-Colton, Finding frequent items in data streams, 2002.
    """
    tensors = [tensor.detach() for tensor in tensors_of(nest) if tensor.numel()]
    if not tensors:
        return ()
    with torch.no_grad(), torch.autocast(tensors[0].device.type, enabled=False):
        return tuple(map(_sums, tensors))


def difference(one: Sketch, other: Sketch) -> float:
    """Return the largest relative difference between the tensors of two sketches.

    0 if it may be rounding, and infinite if the numbers of tensors differ. Waits for the device.
    """
    if len(one) != len(other):
        return float("inf")
    found = 0.0
    for (mine, rounding), (theirs, _) in zip(one, other, strict=True):
        length = float(torch.linalg.vector_norm(mine))
        apart = float(torch.linalg.vector_norm(mine - theirs))
        if apart > rounding * length:  # never true of NaN
            found = max(found, apart / length if length else float("inf"))
    return found


def _sums(tensor: torch.Tensor) -> tuple[torch.Tensor, float]:
    if tensor.is_nested:
        tensor = torch.cat([part.reshape(-1) for part in tensor.unbind()])
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    # Kernels with and without a graph may round differently, by some units in the last place.
    rounding = torch.finfo(tensor.dtype).eps ** 0.75 if tensor.is_floating_point() else 0.0
    wide = torch.float32 if tensor.dtype in _NARROW else torch.float64
    flat = tensor.reshape(-1).to(wide)
    num_rows = -(-flat.numel() // _CLASSES)
    rows = torch.nn.functional.pad(flat, (0, num_rows * _CLASSES - flat.numel()))
    coins = torch.randint(0, 2, (num_rows,), generator=torch.Generator().manual_seed(num_rows))
    signs = (2 * coins - 1).to(rows)
    return signs @ rows.view(num_rows, _CLASSES), rounding


class TrainableParameters:
    """The parameters that all ranks have agreed to train.

    Args:
        held: This rank's parameters by global name.
        names: All parameters of the model, the same on every rank.
        world_group: All ranks.
    """

    def __init__(
        self, held: Mapping[str, nn.Parameter], names: Sequence[str], world_group: ControlGroup
    ) -> None:
        self._parameters = list(held.values())
        numbers = {name: number for number, name in enumerate(names)}
        self._numbers = [numbers[name] for name in held]
        self._names, self._world_group = names, world_group
        self._agreed: list[bool] | None = None
        self._by_any: frozenset[int] = frozenset()

    @property
    def is_agreed(self) -> bool:
        """Return whether ranks have agreed at least once; the same on every rank."""
        return self._agreed is not None

    @property
    def has_changed(self) -> bool:
        """Return whether a parameter of this rank was frozen or unfrozen since then."""
        return self._now() != self._agreed

    def agree(self) -> None:
        """Agree with all ranks on the trained parameters; a collective call.

        Raises ModelError, on all ranks, for a parameter that one rank trains and another does not.
        """
        now = self._now()
        rank = self._world_group.ranks[self._world_group.position]
        pairs = list(zip(self._numbers, now, strict=True))
        own = tuple(
            {n: rank for n, is_trained in pairs if is_trained is kind} for kind in (True, False)
        )
        trains, freezes = self._world_group.merge_object(own, _by_first_rank)
        differing = sorted(trains.keys() & freezes.keys())
        if differing:
            number = differing[0]
            raise ModelError(
                f"{self._names[number]}: rank {trains[number]} trains this parameter, but it is "
                f"frozen on rank {freezes[number]} ({len(differing)} such parameters); set the "
                f"same requires_grad on all ranks that hold it"
            )
        self._agreed, self._by_any = now, frozenset(trains)

    @property
    def names(self) -> list[str]:
        """Return the names of all parameters of the model that are trained, in global order."""
        return [name for number, name in enumerate(self._names) if number in self._by_any]

    def _now(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]


_Ranks = tuple[dict[int, int], ...]
"""Trained parameters, and frozen ones, each with the first rank that trains or freezes it."""


def _by_first_rank(first: _Ranks, second: _Ranks) -> _Ranks:
    return tuple(later | earlier for earlier, later in zip(first, second, strict=True))


def refuse_nothing_trained(num_trained: int) -> None:
    """Raise ModelError, because no parameter got a gradient although the loss is not 0."""
    raise ModelError(
        f"training: none of the {num_trained} parameters that require a gradient got one in this "
        f"step: the loss does not depend on them, or layers cut the graph; remove no_grad() and "
        f"detach() from layers, and use torch.utils.checkpoint with use_reentrant=False or not at "
        f"all, as the pipeline recomputes by itself"
    )


def warn_nothing_trained(num_all: int) -> None:
    """Warn that the model has no trained parameter."""
    log.warning(
        "training: none of the %d parameters requires a gradient, so nothing is trained; unfreeze "
        "some with requires_grad_(True), or use pipe.evaluate if this is intended",
        num_all,
    )


def warn_cut_off(names: Sequence[str], used: Sequence[bool]) -> None:
    """Warn if no trained parameter of the first layers got a gradient, but later ones did.

    `names`: of trained parameters in global order; `used`: whether a micro-batch used each.
    """
    num_cut = next((place for place, is_used in enumerate(used) if is_used), 0)
    with_gradients = {_layer_of(name) for name in names[num_cut:]}
    cut = [name for name in names[:num_cut] if _layer_of(name) not in with_gradients]
    if cut:
        log.warning(
            "training: none of the %d trained parameters of layers %s got a gradient in the first "
            "step, but later layers did: the graph is cut (by no_grad, detach or a reentrant "
            "checkpoint); if this is intended, freeze them with requires_grad_(False)",
            len(cut),
            ", ".join(dict.fromkeys(map(_layer_of, cut))),
        )


def _layer_of(name: str) -> str:
    return name.split(".")[1]
