"""A warning if the user's whole model is used, of which each rank trains only a part.

`model(inputs)`, `model.state_dict()` and `torch.save(model)` would mix trained weights with weights
from before training. `Pipeline` does not change the user's modules, so a hook on the container
(`nn.Sequential`) logs one warning when it is used. The hook is registered by the first step or
load, as before that the model is unchanged.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.utils.hooks import RemovableHandle

from gpipe_hpc.comm.collectives.group import ControlGroup
from gpipe_hpc.models import Layer

log = logging.getLogger("gpipe_hpc.pipeline")


class WholeModel:
    """The container that the user passed as the model, and its layers that other ranks train.

    As a hook of the container it logs one warning when the container, or a copy, is used. A list of
    layers cannot be run, and gets no hook.

    Args:
        given: The model as the user passed it.
        layers: All layers of the model.
        trained: The layers of this rank, as built.
        world_group: The group of all ranks.
        is_one_process: All ranks are threads of this process.
    """

    def __init__(
        self,
        given: object,
        layers: Sequence[Layer],
        trained: Mapping[int, nn.Module],
        world_group: ControlGroup,
        *,
        is_one_process: bool,
    ) -> None:
        self._container = ref(given) if isinstance(given, nn.Module) else None
        # The objects themselves, as a rank may train a copy of a layer.
        own = {id(layers[i]) for i, module in trained.items() if module is layers[i]}
        if is_one_process:
            own = set().union(*world_group.all_gather_object(own))
        self._stale = [
            i for i, each in enumerate(layers) if id(each) not in own and _is_trained(each)
        ]
        self._is_watched, self._is_said = self._container is None, False
        if isinstance(given, nn.Module) and given in _HOOKS:
            earlier, _ = _HOOKS[given]
            if not trained.keys().isdisjoint(earlier._stale):
                earlier()  # this pipeline begins with layers that an earlier one did not train

    def watch(self) -> None:
        """Warn from now on if the container is used and other ranks train some of its layers.

        The container is not kept alive.
        """
        if self._is_watched:
            return
        self._is_watched = True
        container = None if self._container is None else self._container()
        if container is None:
            return
        _, handles = _HOOKS.pop(container, (None, ()))
        for handle in handles:
            handle.remove()
        if self._stale:
            # torch has no types for this method.
            on_read: Callable[..., RemovableHandle] = container.register_state_dict_pre_hook
            handles = container.register_forward_pre_hook(self), on_read(self)
            _HOOKS[container] = self, handles

    def __call__(self, *_: Any) -> None:
        """Log the warning, once."""
        if self._is_said:
            return
        self._is_said = True
        log.warning(
            "model: the module passed to Pipeline is called or saved directly, but its layers %s%s "
            "are trained on other ranks and are outdated on this one; run the model with "
            "pipe.predict or pipe.evaluate, save it with pipe.save, and export all weights with "
            "gpipe_hpc.export.export_safetensors(pipe, folder, prefix='')",
            ", ".join(map(str, self._stale[:8])),
            ", ..." if len(self._stale) > 8 else "",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "WholeModel":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Warn; pickle as a function that does nothing, so that a file loads without gpipe_hpc."""
        self()
        return getattr, (nullcontext(), "__exit__")


def _is_trained(layer: Layer) -> bool:
    """Return whether a layer has trained parameters or buffers, so that training may change it."""
    if not isinstance(layer, nn.Module):
        return True
    return any(p.requires_grad for p in layer.parameters()) or any(True for _ in layer.buffers())


_HOOKS: WeakKeyDictionary[nn.Module, tuple[WholeModel, tuple[RemovableHandle, ...]]] = (
    WeakKeyDictionary()
)
