"""What `Pipeline` is called with: its keywords, checked and spelled as the project spells them."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import signature
from types import MappingProxyType
from typing import Any, Concatenate, Final, ParamSpec

from torch import nn

from gpipe_hpc.comm.failing.tracebacks import OwnFramesLeftOut
from gpipe_hpc.comm.joining.start import DEFAULT_TIMEOUT_S, start_world
from gpipe_hpc.comm.nests import Nest
from gpipe_hpc.comm.watch.settings import DEFAULT_SILENCE_S
from gpipe_hpc.comm.world import World, together
from gpipe_hpc.config.removed import refusal_of_removed
from gpipe_hpc.config.spelling import bytes_of_ranks, canonical_precision, num_bytes, suggestion
from gpipe_hpc.data_parallel import Outer
from gpipe_hpc.engine.layers.precision import check_precision
from gpipe_hpc.engine.state.drift import POLICIES
from gpipe_hpc.engine.sums.loss import LossFunction
from gpipe_hpc.errors import ConfigError, KeywordError
from gpipe_hpc.models import Layer, torch_loss
from gpipe_hpc.planning.fit import FIT
from gpipe_hpc.planning.memory.by_rank import MEASURED_PACES
from gpipe_hpc.planning.request import Request, Settings
from gpipe_hpc.schedule import canonical_schedule, replicas_on
from gpipe_hpc.schedule.passes.recompute import RECOMPUTE_MODES
from gpipe_hpc.torch_compat import refuse_unfit_torch


@dataclass(frozen=True, kw_only=True)
class Keywords(Settings):
    """What `Pipeline` takes by keyword: a request, and where and on what it is carried out."""

    replicas: int | None = None
    example: tuple[Nest, Nest] | None = None
    device: str = "auto"
    timeout_s: float = DEFAULT_TIMEOUT_S
    silence_s: float = DEFAULT_SILENCE_S
    stall_s: float | None = None
    bind: str = "none"
    num_threads: str | int | None = None
    world: World | None = None

    def request(self) -> Request:
        """Return the request, spelled as the project spells it, on the ranks of the world.

        Raises ConfigError for a choice that there is not.
        """
        assert self.world is not None, "joined before"
        named = {each.name: getattr(self, each.name) for each in fields(Settings)}
        schedule = self.schedule
        request = replace(
            Request(**named, replicas=replicas_on(self.world.size, self.stages, self.replicas)),
            schedule=canonical_schedule(schedule) if isinstance(schedule, str) else schedule,
            recompute=self.recompute.lower(),
            paces=self.paces.lower() if isinstance(self.paces, str) else self.paces,
            precision=canonical_precision(self.precision),
            memory_bytes=bytes_of_ranks(self.memory_bytes, "memory_bytes"),
            outer=_outer_of(self.outer),
        )
        check_precision(request.precision)
        _check_choice("pipeline.buffers", request.buffers, POLICIES)
        if isinstance(request.stages, str):
            _check_choice("stages", request.stages, (FIT,))
        if isinstance(request.paces, str):
            _check_choice("paces", request.paces, (MEASURED_PACES,))
        _check_choice("recompute", request.recompute, (*RECOMPUTE_MODES, "budget"))
        return request


# Keywords that the command line calls otherwise, or splits.
_OF_COMMAND_LINE: Final[Mapping[str, str]] = MappingProxyType(
    {"options": "schedule_options", "loss": "loss_fn", "model": "layers"}
)
_OF_WORLD: Final = ("device", "timeout_s", "silence_s", "stall_s")

P = ParamSpec("P")
Layers = nn.Sequential | Sequence[Layer]
TakesRecord = Callable[[Any, Layers, LossFunction, Keywords], None]
TakesKeywords = Callable[Concatenate[Any, Layers, LossFunction, P], None]


def by_keyword(
    record: Callable[P, Keywords],
) -> Callable[[TakesRecord], TakesKeywords[P]]:
    """Let a constructor be called with the fields of a record as keywords, each with its type."""

    def decorate(make: TakesRecord) -> TakesKeywords[P]:
        own, fields_of_record = signature(make), signature(record).parameters
        positional = list(own.parameters.values())[:-1]

        def init(self: Any, /, *args: Any, **kwargs: Any) -> None:
            with OwnFramesLeftOut():
                refuse_unfit_torch()
                # First of all, so that what is mistaken is told as one message of one rank.
                world = _world_of(kwargs)
                with together(world, "start"):
                    layers, loss_fn = _model_and_loss(args, kwargs)
                    _refuse_unknown(kwargs, fields_of_record)
                    build: Callable[..., Keywords] = record
                    given = build(**{**kwargs, "world": world})
                make(self, layers, loss_fn, given)

        shown = own.replace(parameters=[*positional, *fields_of_record.values()])
        init.__dict__["__signature__"] = shown  # what `help` and editors show
        return init

    return decorate


def _world_of(given: Mapping[str, Any]) -> World:
    """Return the world that is given, or else joined as the keywords say."""
    world: World | None = given.get("world")
    if world is not None:
        return world
    return start_world(**{name: given[name] for name in _OF_WORLD if name in given})


def _model_and_loss(args: Sequence[Any], given: dict[str, Any]) -> tuple[Layers, LossFunction]:
    """Return the first two arguments, by place or taken from those by name."""
    names = ("layers", "loss_fn")
    found = dict(zip(names, args, strict=False))
    twice = [name for name in found if name in given]
    found |= {name: given.pop(name) for name in names if name in given}
    if len(args) > len(names) or twice or len(found) < len(names):
        by_place = f"{len(args)} by place" + "".join(f", {name} once more" for name in twice)
        raise KeywordError(
            f"Pipeline: expected the layers, the loss, and all else by keyword, got {by_place}; "
            f"write Pipeline(layers, loss_fn, stages=2, microbatches=8)"
        )
    _refuse_no_loss(found["loss_fn"])
    return found["layers"], found["loss_fn"]


def _refuse_no_loss(loss_fn: object) -> None:
    if loss_fn is None:  # it only predicts
        return
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        got = f"the class {loss_fn.__name__}; make it, as {loss_fn.__name__}()"
    elif not callable(loss_fn):
        got = f"{type(loss_fn).__name__}; give a function"
    elif not _takes_two(loss_fn):
        taken = signature(_called(loss_fn))
        got = f"one of {taken}; let it take both, and bind what else it takes, as by a lambda"
    elif (known := torch_loss(loss_fn)) is not None and known.reduction == "none":
        got = "one with reduction='none', which returns many numbers; use 'mean' or 'sum'"
    else:
        return
    raise ConfigError(f"loss_fn: expected a function of (output, target), got {got}")


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a call ends up in: a module itself would take anything."""
    return function.forward if isinstance(function, nn.Module) else function


def _takes_two(function: Callable[..., Any]) -> bool:
    """Say whether a function can be called with two arguments; also where nobody can know."""
    try:
        taken = signature(_called(function))
    except (TypeError, ValueError):  # some of torch's have none
        return True
    try:
        taken.bind(None, None)
    except TypeError:
        return False
    return True


def _outer_of(given: Outer | Mapping[str, Any]) -> Outer:
    """Return the settings of the outer data parallelism; ConfigError for an unknown one."""
    if isinstance(given, Outer):
        return given
    known = [each.name for each in fields(Outer)]
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"outer: expected an Outer or a dict of its settings, got {given!r}; write "
            f"outer={{'compress': 'bfloat16'}}, or leave it out"
        )
    for name, value in given.items():
        if name not in known:
            raise refusal_of_removed(f"outer.{name}", str(value)) or ConfigError(
                f"outer: unknown setting {name}, expected some of {', '.join(known)}; "
                f"{suggestion(name, known)}correct it"
            )
    named = dict(given)
    if "bucket_bytes" in named:
        named["bucket_bytes"] = num_bytes(named["bucket_bytes"], "outer.bucket_bytes")
    if isinstance(named.get("compress"), str):
        named["compress"] = canonical_precision(named["compress"])
    return Outer(**named)


def _check_choice(keyword: str, value: object, known: Collection[str]) -> None:
    """Raise ConfigError for a value that is none of those known."""
    if value not in known:
        raise ConfigError(
            f"{keyword}: expected one of {', '.join(known)}, got {value!r}; "
            f"{suggestion(str(value), known)}correct it"
        )


def _refuse_unknown(given: Iterable[str], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            meant = _OF_COMMAND_LINE.get(name)
            near = f"did you mean {meant}? " if meant else suggestion(name, known)
            some = "one that help(Pipeline) lists" if near else f"some of {', '.join(known)}"
            raise KeywordError(
                f"Pipeline: unknown keyword {name}, expected {some}, got {name}; {near}correct it"
            )


def name_of(loss_fn: LossFunction | None) -> dict[str, object]:
    """Return what a loss is called, if there is one: ranks that need none may have none."""
    if loss_fn is None:
        return {}
    inner = getattr(loss_fn, "func", loss_fn)  # of a functools.partial
    return {"loss_fn": getattr(inner, "__qualname__", type(inner).__qualname__)}
