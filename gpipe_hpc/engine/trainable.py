"""Agreement of all ranks on which parameters are trained.

Messages between copies of a stage have the size of the trained parameters. A copy that has frozen
more than another would send less, and Gloo aborts a process that receives more than it expects. So
copies reduce the parameters that all agreed on, and agree again if a rank changed one.
"""

import logging
from collections.abc import Mapping, Sequence

from torch import nn

from gpipe_hpc.comm.collectives.group import ControlGroup
from gpipe_hpc.errors import ModelError

log = logging.getLogger("gpipe_hpc.pipeline")


class TrainableParameters:
    """The parameters that all ranks have agreed to train.

    Args:
        held: This rank's parameters by global name.
        names: All parameters of the model, the same on every rank.
        everybody: All ranks.
    """

    def __init__(
        self, held: Mapping[str, nn.Parameter], names: Sequence[str], everybody: ControlGroup
    ) -> None:
        self._parameters = list(held.values())
        numbers = {name: number for number, name in enumerate(names)}
        self._numbers = [numbers[name] for name in held]
        self._names, self._everybody = names, everybody
        self._agreed: list[bool] | None = None
        self._by_any: frozenset[int] = frozenset()

    @property
    def is_agreed(self) -> bool:
        """Return whether ranks have agreed once; the same on every rank."""
        return self._agreed is not None

    @property
    def has_changed(self) -> bool:
        """Return whether a parameter of this rank was frozen or unfrozen since the agreement."""
        return self._now() != self._agreed

    def agree(self) -> None:
        """Agree with all ranks on the trained parameters; a collective call.

        Raises ModelError, on all ranks, for a parameter that one rank trains and another does not.
        """
        now = self._now()
        rank = self._everybody.ranks[self._everybody.position]
        pairs = list(zip(self._numbers, now, strict=True))
        own = tuple(
            {n: rank for n, is_trained in pairs if is_trained is kind} for kind in (True, False)
        )
        trains, freezes = self._everybody.merge_object(own, _by_first_rank)
        differing = sorted(trains.keys() & freezes.keys())
        if differing:
            number = differing[0]
            raise ModelError(
                f"{self._names[number]}: expected each parameter to be trained on all ranks that "
                f"hold it, or on none, got {len(differing)} that some rank trains and another has "
                f"frozen, as rank {trains[number]} and rank {freezes[number]} this one; set "
                f"requires_grad alike on all ranks"
            )
        self._agreed, self._by_any = now, frozenset(trains)

    @property
    def names(self) -> list[str]:
        """Return the names of all parameters of the model that are trained, in global order."""
        return [name for number, name in enumerate(self._names) if number in self._by_any]

    def _now(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]


_Ranks = tuple[dict[int, int], ...]
"""Trained and frozen parameters, each with the first such rank."""


def _by_first_rank(first: _Ranks, second: _Ranks) -> _Ranks:
    return tuple(later | earlier for earlier, later in zip(first, second, strict=True))


def refuse_nothing_trained(num_trained: int) -> None:
    """Raise ModelError: no parameter got a gradient although the loss is not 0."""
    raise ModelError(
        f"training: none of the {num_trained} parameters that require a gradient got one in this "
        f"step, so that nothing would be trained: the loss does not depend on them, or layers cut "
        f"the graph; take no_grad() and detach() out of them, and use torch.utils.checkpoint with "
        f"use_reentrant=False (or none: the pipeline recomputes by itself)"
    )


def warn_nothing_trained(num_all: int) -> None:
    """Warn that the model has no trained parameter."""
    log.warning(
        "training: none of the %d parameters requires a gradient, so nothing is trained; unfreeze "
        "some with requires_grad_(True), or use pipe.evaluate if that is meant",
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
            "step, while later layers did: something cuts the graph (no_grad, detach, a "
            "reentrant checkpoint); freeze them with requires_grad_(False) if that is meant",
            len(cut),
            ", ".join(dict.fromkeys(map(_layer_of, cut))),
        )


def _layer_of(name: str) -> str:
    return name.split(".")[1]
