"""Supported versions of torch, and the private names of torch, each with its fallback.

Names in `_REQUIRED` are needed to start: `refuse_unfit_torch` raises one error that lists those
that are missing. The following names are optional:

- `torch._C._storage_Use_Count` (since 2.1): without it, gradients and outputs are copied, as if
  other tensors shared their memory.
- `torch._C._will_engine_execute_node` (2.0), `_is_fwd_grad_enabled` (1.11),
  `_are_functorch_transforms_active` (2.1), `_autograd._top_saved_tensors_default_hooks` (2.1):
  without one of them, a split backward computes all gradients in `I`, and `W` does nothing.
  `Pipeline` warns.
- `torch._debug_has_internal_overlap` (1.6): without it, strides are compared, which takes 5 us.
- `torch.autograd.graph._engine_run_backward` (2.2): without it, `torch.autograd.backward` and
  `grad` are used, whose checks take longer than the backward of a small layer.
- The operators `aten._to_copy` and `aten._scaled_dot_product_flash_attention_for_cpu` with its
  backward (2.1): without them, planned memory and FLOPs are those of torch's plain kernels.

`torch._foreach_*` are documented functions of torch, and need no fallback.
"""

import logging
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import torch

from gpipe_hpc.errors import ConfigError

__all__ = [
    "HANDS_OVER_BACKWARD",
    "NEWEST_TESTED",
    "OLDEST",
    "FakeTensor",
    "FakeTensorMode",
    "HashStore",
    "NormBase",
    "PrefixStore",
    "Store",
    "TCPStore",
    "TorchDispatchMode",
    "are_functorch_transforms_active",
    "asked_of_backward",
    "can_split_backward",
    "current_graph_task_id",
    "default_store",
    "gloo_options",
    "has_internal_overlap",
    "is_forward_ad_enabled",
    "new_process_group",
    "operator",
    "pytree",
    "ranks_of_groups",
    "refuse_unfit_torch",
    "run_backward",
    "storage_info",
    "storage_use_count",
    "top_saved_tensors_hooks",
    "warn_of_untested_torch",
    "will_engine_execute",
]

log = logging.getLogger("gpipe_hpc.pipeline")

OLDEST: Final = (2, 8)
NEWEST_TESTED: Final = (2, 15)

# Modules of torch and the names used from them, with the version that introduced each.
_REQUIRED: Final = (
    ("torch", "Tensor._base"),  # 0.4
    ("torch", "Tensor._version"),  # 0.4
    ("torch", "Tensor._backward_hooks"),  # 0.4
    ("torch", "Tensor._post_accumulate_grad_hooks"),  # 2.1
    ("torch", "Tensor._is_zerotensor"),  # 1.11
    ("torch", "UntypedStorage._cdata"),  # 2.0
    ("torch", "_C._current_graph_task_id"),  # 2.0
    ("torch", "ops.aten.add.Tensor._schema"),  # 1.11
    ("torch._subclasses.fake_tensor", "FakeTensor"),  # 1.13
    ("torch._subclasses.fake_tensor", "FakeTensorMode"),  # 1.13
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),  # 2.0
    ("torch.distributed.distributed_c10d", "_get_default_store"),  # 1.0
    ("torch.distributed.distributed_c10d", "_new_process_group_helper"),  # 1.0
    ("torch.distributed.distributed_c10d", "_world.pg_group_ranks"),  # 2.0
    ("torch.nn.modules.batchnorm", "_NormBase"),  # 1.4
    ("torch.nn.modules.batchnorm", "_NormBase._check_input_dim"),  # 1.4
    ("torch.utils._python_dispatch", "TorchDispatchMode"),  # 1.12
    ("torch.utils._pytree", "SUPPORTED_NODES"),  # 1.8
    ("torch.utils._pytree", "TreeSpec"),  # 1.8
    ("torch.utils._pytree", "tree_flatten"),  # 1.8
    ("torch.utils._pytree", "tree_is_leaf"),  # 2.2
    ("torch.utils._pytree", "tree_leaves"),  # 2.2
    ("torch.utils._pytree", "tree_structure"),  # 2.2
)
# Attributes in which modules store their tensors.
_REQUIRED_OF_MODULES: Final = ("_buffers", "_non_persistent_buffers_set", "_parameters")


def refuse_unfit_torch() -> None:
    """Raise ConfigError if torch is too old or lacks a required name."""
    if _version() < OLDEST:
        raise ConfigError(f"torch: version {torch.__version__} is too old; {_wanted()}")
    missing = [f"{module}.{name}" for module, name in _REQUIRED if _found(module, name) is None]
    if _found("torch.distributed", "is_gloo_available", bool)() and not gloo_options:
        missing.append("torch.distributed.ProcessGroupGloo._Options")
    module = torch.nn.Module()
    missing += [f"torch.nn.Module.{n}" for n in _REQUIRED_OF_MODULES if not hasattr(module, n)]
    if missing:
        raise ConfigError(
            f"torch: version {torch.__version__} has no {', '.join(missing)}, which gpipe_hpc "
            f"uses; {_wanted()}, or a newer gpipe_hpc"
        )


@cache
def warn_of_untested_torch() -> None:
    """Log a warning, once per process, if torch is newer than the newest tested version."""
    if _version() > NEWEST_TESTED:
        log.warning(
            "torch %s is newer than %d.%d, the newest that this version of gpipe_hpc was tested "
            "with; compare a short run with that of a tested version, or use a newer gpipe_hpc",
            torch.__version__,
            *NEWEST_TESTED,
        )


def _version() -> tuple[int, int]:
    """Return major and minor version: (2, 13) for ``2.13.0a0+8145d630e8.nv26.06``."""
    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)
    assert numbers is not None, "torch has a version"
    return int(numbers[1]), int(numbers[2])


def _wanted() -> str:
    return "install torch {}.{} to {}.{}".format(*OLDEST, *NEWEST_TESTED)


def _found(module: str, name: str, default: Any = None) -> Any:
    """Return the object with a dotted name in a module of torch, or `default` if it is missing."""
    try:
        found: Any = import_module(module)
        for part in name.split(".") if name else ():
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return default
    return found


# If one of these classes is missing, classes derived from it can be defined, but are never used.
if TYPE_CHECKING:
    from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.nn.modules.batchnorm import _NormBase as NormBase
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    FakeTensor = _found("torch._subclasses.fake_tensor", "FakeTensor", object)
    FakeTensorMode = _found("torch._subclasses.fake_tensor", "FakeTensorMode", object)
    NormBase = _found("torch.nn.modules.batchnorm", "_NormBase", object)
    TorchDispatchMode = _found("torch.utils._python_dispatch", "TorchDispatchMode", object)
    pytree = _found("torch.utils._pytree", "")
    # Public, but their types are not.
    HashStore = _found("torch.distributed", "HashStore")
    PrefixStore = _found("torch.distributed", "PrefixStore")
    Store = _found("torch.distributed", "Store", object)
    TCPStore = _found("torch.distributed", "TCPStore")
    # Public, but their types are not.


@cache
def storage_info() -> Any:
    """Return torch's class for the location of a stored tensor in a distributed checkpoint file."""
    # Loaded lazily, because torch.distributed.checkpoint is slow to import.
    return _found("torch.distributed.checkpoint.filesystem", "_StorageInfo")


def default_store() -> Store:
    """Return the store of torch's default process group."""
    store: Store = _found("torch.distributed.distributed_c10d", "_get_default_store")()
    return store


def new_process_group(*args: Any, **keywords: Any) -> Any:
    """Create a process group without a collective call of other ranks; return it and its name."""
    return _found("torch.distributed.distributed_c10d", "_new_process_group_helper")(
        *args, **keywords
    )


def ranks_of_groups() -> Any:
    """Return torch's table of process groups: for each group, the group rank of each world rank."""
    return _found("torch.distributed.distributed_c10d", "_world.pg_group_ranks")


def current_graph_task_id() -> int:
    """Return the id of the backward that this thread runs, or -1 outside of a backward."""
    return torch._C._current_graph_task_id()


def _unknown_count(address: int) -> int:
    return sys.maxsize


def _overlap_by_strides(tensor: torch.Tensor) -> int:
    dense = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
    return 0 if dense.stride() == tensor.stride() else 2


def _absent(*_: Any) -> Any:
    raise AssertionError("backwards are not split without this function")


gloo_options: Callable[[], Any] | None = _found("torch.distributed", "ProcessGroupGloo._Options")
"""Creates the options of a Gloo process group, to be filled in; None if torch has no Gloo."""

storage_use_count: Callable[[int], int] = _found("torch", "_C._storage_Use_Count", _unknown_count)
"""Returns the reference count of a storage, given its `_cdata`; sys.maxsize if unknown."""

has_internal_overlap: Callable[[torch.Tensor], int] = _found(
    "torch", "_debug_has_internal_overlap", _overlap_by_strides
)
"""Returns 0 if no two elements of a tensor share memory and there are no gaps between them."""

will_engine_execute: Callable[[Any], bool] = _found(
    "torch", "_C._will_engine_execute_node", _absent
)
"""Returns, within a backward, whether it will execute a node; see `can_split_backward`."""

is_forward_ad_enabled: Callable[[], bool] = _found("torch", "_C._is_fwd_grad_enabled", _absent)
"""Returns False within the forward of an `autograd.Function`; see `can_split_backward`."""

are_functorch_transforms_active: Callable[[], bool] = _found(
    "torch", "_C._are_functorch_transforms_active", _absent
)
"""See `can_split_backward`."""

top_saved_tensors_hooks: Callable[[bool], Any] = _found(
    "torch", "_C._autograd._top_saved_tensors_default_hooks", _absent
)
"""Returns the innermost saved-tensor hooks of autograd; see `can_split_backward`."""


def can_split_backward() -> bool:
    """Return whether torch has the functions needed to split a backward into ``I`` and ``W``."""
    return _absent not in (
        will_engine_execute,
        is_forward_ad_enabled,
        are_functorch_transforms_active,
        top_saved_tensors_hooks,
    )


def _run_checked(
    edges: Sequence[Any],
    gradients: Sequence[torch.Tensor],
    keep_graph: bool,
    create_graph: bool,
    inputs: Sequence[torch.Tensor],
    *,
    allow_unreachable: bool,
    accumulate_grad: bool,
) -> tuple[torch.Tensor | None, ...]:
    if not accumulate_grad:
        return torch.autograd.grad(
            edges, inputs, gradients, keep_graph, create_graph, allow_unused=allow_unreachable
        )
    torch.autograd.backward(edges, gradients, keep_graph, create_graph, inputs=inputs or None)
    return ()


run_backward: Callable[..., tuple[torch.Tensor | None, ...]] = _found(
    "torch.autograd.graph", "_engine_run_backward", _run_checked
)
"""Runs autograd's engine; see `engine.backward`."""


def operator(name: str) -> Any:
    """Return a private operator of aten, or None if it is missing."""
    return _found("torch", f"ops.aten.{name}")


_BACKWARD: Final[Any] = getattr(torch.autograd.backward, "__code__", None)

HANDS_OVER_BACKWARD: Final = _BACKWARD is None or "handle_torch_function" in _BACKWARD.co_names
"""Whether torch passes calls of `torch.autograd.backward` to `__torch_function__`; since 2.11."""

# Functions that `backward` calls on outputs and gradients, which older versions pass instead.
_DTYPE: Final[Any] = torch.Tensor.dtype
_ASKED_BY_BACKWARD: Final = frozenset({_DTYPE.__get__, torch.Tensor.size, torch.ones})


def asked_of_backward(func: Any) -> tuple[Any, Any] | None:
    """Return outputs and inputs of the `torch.autograd.backward` that called `func`, else None.

    Must be called by a `__torch_function__`. In versions of torch that do not pass `backward`
    itself to that method, this is the only way to get them (pytorch PR 171473).
    """
    if func not in _ASKED_BY_BACKWARD:
        return None
    asking = sys._getframe(2).f_back
    if asking is None or asking.f_code is not _BACKWARD:
        return None
    return asking.f_locals["tensors"], asking.f_locals["inputs"]
