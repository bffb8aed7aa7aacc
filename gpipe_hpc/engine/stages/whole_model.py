"""A warning if a model given as nn.Sequential is used: each rank trains only a part of it.

`model(inputs)`, `model.state_dict()` and `torch.save(model)` work then, and mix trained weights
with those from before training. `Pipeline` does not change the user's modules, so a hook on the
container logs one warning when it is used. It is set by the first step or load, as before that
the model is what it was.
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
    """The container that was given as the model, and which of its layers this process trains.

    `trained`: the layers of this rank, as built. A list of layers cannot be run and is not watched.
    """

    def __init__(
        self,
        given: object,
        layers: Sequence[Layer],
        trained: Mapping[int, nn.Module],
        everybody: ControlGroup,
        *,
        is_one_process: bool,
    ) -> None:
        self._container = ref(given) if isinstance(given, nn.Module) else None
        # The objects themselves: a rank may work on a copy of a layer, which leaves the given one.
        own = {id(layers[i]) for i, module in trained.items() if module is layers[i]}
        if is_one_process:
            own = set().union(*everybody.all_gather_object(own))
        self._stale = [
            i for i, each in enumerate(layers) if id(each) not in own and _is_trained(each)
        ]
        self._is_watched = self._container is None
        if isinstance(given, nn.Module) and given in _HOOKS:
            hook, _ = _HOOKS[given]
            if not trained.keys().isdisjoint(hook.stale):
                hook()  # a second pipeline begins with layers that the first one did not train

    def watch(self) -> None:
        """Warn from now on if the container is used and other ranks train some of its layers.

        The container is not kept alive: whoever has dropped it needs no memory for it.
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
            hook = _StaleHook(self._stale)
            # torch has left the second one without types.
            on_read: Callable[..., RemovableHandle] = container.register_state_dict_pre_hook
            handles = container.register_forward_pre_hook(hook), on_read(hook)
            _HOOKS[container] = hook, handles


def _is_trained(layer: Layer) -> bool:
    """Return whether training may change a layer: it has trained parameters or buffers."""
    if not isinstance(layer, nn.Module):
        return True
    return any(p.requires_grad for p in layer.parameters()) or any(True for _ in layer.buffers())


class _StaleHook:
    """Logs one warning when it is called, by whatever uses the container or a copy of it."""

    def __init__(self, stale: Sequence[int]) -> None:
        self.stale = frozenset(stale)
        self._is_said = False

    def __call__(self, *_: Any) -> None:
        if self._is_said:
            return
        self._is_said = True
        names = ", ".join(str(index) for index in sorted(self.stale)[:8])
        log.warning(
            "model: the module that was given to Pipeline is used as a whole, but its layers %s%s "
            "are trained on other ranks and have old weights on this one; run the model by "
            "pipe.predict or pipe.evaluate, save it by pipe.save, and write all its weights by "
            "gpipe_hpc.export.export_safetensors(pipe, folder, prefix='')",
            names,
            ", ..." if len(self.stale) > 8 else "",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "_StaleHook":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Warn, and pickle as a function that does nothing: a file needs no gpipe_hpc to load."""
        self()
        return getattr, (nullcontext(), "__exit__")


_HOOKS: WeakKeyDictionary[nn.Module, tuple[_StaleHook, tuple[RemovableHandle, ...]]] = (
    WeakKeyDictionary()
)
