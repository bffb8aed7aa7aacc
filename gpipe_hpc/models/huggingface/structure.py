"""Find the parts of a transformers model by tracing one forward on the meta device.

The model calls a *core* (LlamaModel, GPT2Model, ViTModel: the module that owns the list of blocks).
The core creates hidden states, runs its blocks in order, and then its closing modules (a norm). The
model computes logits from the core's output. Models with a different data flow are rejected.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.huggingface.calls import Call, Form, bound, same_values, unknown
from gpipe_hpc.models.huggingface.meta_tensors import TrueConditions

_BATCH: Final = 2
_LENGTH: Final = 8
LAST: Final = "last_hidden_state"


class Structure(NamedTuple):
    """Module paths of the parts of a model, and the arguments with which they are called."""

    core: str
    blocks: str
    closing: tuple[str, ...]  # modules after the blocks, in order
    main_input: str
    inputs: dict[str, Any]  # arguments of the core; None for the model's inputs
    forms: tuple[Form, ...]  # of each block's call
    num_returned: int  # length of the tuple that a block returns, 0 for a tensor
    returned: type  # output type of the core
    logits: tuple[int, ...]  # shape for the inputs of `example_inputs`

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks."""
        return len(self.forms)


class _ModuleCall(NamedTuple):
    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@dataclass
class _Trace:
    """Recorded calls within the core, in order: blocks, and other modules called directly."""

    core_calls: list[_ModuleCall] = field(default_factory=list)
    steps: list[_ModuleCall] = field(default_factory=list)
    depth: int = 0


def find_structure(model: nn.Module) -> Structure:
    """Run `model`, which is on the meta device, and return its structure.

    Raises:
        ModelError: the data flow of the model differs from that described above.
    """
    kind = type(model).__name__
    blocks = _largest_list(model, kind)
    above = blocks.split(".")[:-1]
    if not above:
        raise unknown(kind, "has its blocks at the top level", "no module contains blocks and norm")
    # If the nearest owner of the blocks is called with embeddings, its caller is the core.
    for depth in range(len(above), 0, -1):
        try:
            return _structure_under(model, ".".join(above[:depth]), blocks, kind)
        except _CoreIsOuterModule as error:
            refusal = error
    raise refusal.reason


class _CoreIsOuterModule(Exception):
    """Raised if a module cannot be the core because its inputs are not those of the model.

    The module that calls it is the next candidate for the core.
    """

    def __init__(self, reason: ModelError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _structure_under(model: nn.Module, core: str, blocks: str, kind: str) -> Structure:
    trace = _Trace()
    inputs = example_inputs(model)
    with _traced(model, core, blocks, trace):
        output = run_on_meta(kind, partial(model, **inputs, **_no_cache(model)))
    if len(trace.core_calls) != 1:
        raise unknown(kind, f"calls {core} {len(trace.core_calls)} times", "not a single call")
    called = trace.core_calls[0]
    core_inputs = _core_inputs(model.get_submodule(core), called, inputs, kind)
    ran = _runs_of_blocks(model, blocks, trace, kind)
    behind = trace.steps[trace.steps.index(ran[-1]) + 1 :]
    return Structure(
        core=core,
        blocks=blocks,
        closing=_closing(behind, ran[-1], called.output, trace.steps, kind),
        main_input=next(iter(inputs)),
        inputs=core_inputs,
        forms=tuple(Call.of(step.args, step.kwargs, kind).form for step in ran),
        num_returned=len(ran[0].output) if isinstance(ran[0].output, tuple) else 0,
        returned=type(called.output),
        logits=tuple(output.logits.shape),
    )


def _runs_of_blocks(model: nn.Module, blocks: str, trace: _Trace, kind: str) -> list[_ModuleCall]:
    """Return the recorded calls of the blocks, in order.

    Raises ModelError unless each block runs once, in order, on the output of the previous one.
    """
    paths = [f"{blocks}.{name}" for name, _ in model.get_submodule(blocks).named_children()]
    ran = [step for step in trace.steps if step.path in paths]
    if [step.path for step in ran] != paths:
        raise unknown(kind, "does not run its blocks once each, in order", f"{len(ran)} calls")
    extras: list[Tensor] = []
    hidden: Tensor | None = None
    for step in ran:
        call = Call.of(step.args, step.kwargs, f"{kind}: {step.path}")
        if hidden is not None and not same_values(hidden, call.hidden):
            raise unknown(kind, f"changes hidden states before {step.path}", "other operations")
        if any(leaf is extra for leaf in call.leaves for extra in extras):
            raise unknown(kind, f"passes outputs of a block to {step.path}", "a further tensor")
        hidden = _hidden_of(step, kind)
        if isinstance(step.output, tuple):
            extras += [each for each in step.output[1:] if isinstance(each, Tensor)]
    return ran


def example_inputs(model: Any) -> dict[str, Tensor]:
    """Return example inputs of the model on the meta device."""
    name, config = model.main_input_name, model.config
    if name == "input_ids":
        return {name: torch.zeros(_BATCH, _LENGTH, dtype=torch.int64, device="meta")}
    size = getattr(config, "image_size", None)
    if name != "pixel_values" or size is None:
        raise unknown(type(model).__name__, "has unsupported inputs", str(name))
    height, width = size if isinstance(size, list | tuple) else (size, size)
    shape = (_BATCH, getattr(config, "num_channels", 3), height, width)
    return {name: torch.zeros(shape, dtype=model.dtype, device="meta")}


def run_on_meta(kind: str, function: Any) -> Any:
    """Call a function on the meta device; raise `ModelError` if that fails."""
    try:
        with torch.device("meta"), torch.enable_grad(), TrueConditions():
            return function()
    except ModelError:
        raise
    except Exception as error:
        raise unknown(
            kind, "cannot be run on the meta device", f"{type(error).__name__}: {error}"
        ) from error


def _no_cache(model: nn.Module) -> dict[str, Any]:
    # Decoders keep keys and values for generation by default.
    return {"use_cache": False} if "use_cache" in _names(model.forward) else {}


def _names(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def _largest_list(model: nn.Module, kind: str) -> str:
    sizes: dict[str, int] = {
        path: sum(p.numel() for p in module.parameters())
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    if not sizes:
        raise unknown(kind, "has no list of blocks", "no ModuleList")
    # The first of the largest; lists inside blocks come later and are smaller.
    return max(sizes.items(), key=lambda entry: entry[1])[0]


@contextmanager
def _traced(model: nn.Module, core: str, blocks: str, trace: _Trace) -> Iterator[None]:
    """Context that records calls of the core, its blocks, and other modules called directly."""
    handles = []
    for path, module in model.named_modules():
        # Modules between the core and its blocks (an encoder) are not recorded themselves.
        between = path != core and f"{blocks}.".startswith(f"{path}.")
        within_block = path.startswith(f"{blocks}.") and "." in path.removeprefix(f"{blocks}.")
        if between or within_block or not f"{path}.".startswith(f"{core}."):
            continue

        def enter(module: nn.Module, args: Any) -> None:
            trace.depth += 1

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
            trace.depth -= 1
            step = _ModuleCall(path, args, kwargs, output)
            if path == core:
                trace.core_calls.append(step)
            elif trace.depth == 1:
                trace.steps.append(step)

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hidden_of(step: _ModuleCall, kind: str) -> Tensor:
    """Return the hidden states that a block or module returns, alone or first in a tuple."""
    output = step.output[0] if isinstance(step.output, tuple) else step.output
    if not isinstance(output, Tensor):
        raise unknown(kind, f"has a {step.path} without hidden states", type(output).__name__)
    return output


def _closing(
    behind: list[_ModuleCall], last: _ModuleCall, result: Any, steps: list[_ModuleCall], kind: str
) -> tuple[str, ...]:
    """Return the modules after the blocks, each of which takes the output of the previous one."""
    hidden = _hidden_of(last, kind)
    for step in behind:
        alone = len(step.args) == 1 and not step.kwargs
        if not alone or not same_values(hidden, step.args[0]):
            raise unknown(kind, f"calls {step.path} after its blocks", "inputs of another module")
        if sum(each.path == step.path for each in steps) != 1:
            raise unknown(kind, f"calls {step.path} more than once", "a module used in two places")
        if not isinstance(step.output, Tensor):
            raise unknown(kind, f"has {step.path} after its blocks", type(step.output).__name__)
        hidden = step.output
    if not isinstance(result, Mapping) or LAST not in result:
        raise unknown(kind, "has a core that returns no last hidden state", type(result).__name__)
    if not same_values(hidden, result[LAST]):
        raise unknown(kind, "changes hidden states after its blocks", "operations outside modules")
    extras = [name for name, value in result.items() if name != LAST and value is not None]
    if extras:
        raise unknown(kind, "has a core that returns more than hidden states", extras[0])
    return tuple(step.path for step in behind)


def _core_inputs(
    core: nn.Module, called: _ModuleCall, inputs: dict[str, Tensor], kind: str
) -> dict[str, Any]:
    """Return the arguments of the core by name, with None for the model's inputs."""
    given = list(inputs.values())
    arguments = bound(core.forward, called.args, called.kwargs)
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            if not any(value is each for each in given):
                raise _CoreIsOuterModule(
                    unknown(kind, f"computes {name} before its core", "a computed tensor")
                )
        elif not isinstance(value, type(None) | bool | int | float | str):
            raise unknown(kind, f"passes {name} to its core", type(value).__name__)
    if next(iter(inputs)) not in arguments:
        raise unknown(
            kind, "does not pass its inputs to its core", ", ".join(arguments) or "nothing"
        )
    return {n: None if isinstance(value, Tensor) else value for n, value in arguments.items()}
