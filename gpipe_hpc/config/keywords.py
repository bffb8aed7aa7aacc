"""Keywords of `Pipeline`, with the types, checks and spellings of the settings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import signature
from types import MappingProxyType
from typing import Any, Concatenate, Final, ParamSpec

from torch import nn

from gpipe_hpc.comm.watchdog.tracebacks import OwnFramesStripped
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.comm.world.world import World, collective_errors
from gpipe_hpc.config.removed import refusal_of_removed
from gpipe_hpc.errors import ConfigError, KeywordError
from gpipe_hpc.models import Layer, LossFunction, torch_loss
from gpipe_hpc.planner import Partition
from gpipe_hpc.planner.request import Request, Settings
from gpipe_hpc.pytree import Nest
from gpipe_hpc.schedule import Schedule, replicas_on
from gpipe_hpc.settings import (
    Config,
    Outer,
    PipelineConfig,
    Setting,
    TrainConfig,
    settings_of,
    suggestion,
)
from gpipe_hpc.torch_compat import refuse_unfit_torch

_COMM: Final = Config().comm


@dataclass(frozen=True, kw_only=True)
class Keywords(Settings):
    """Keywords of `Pipeline`: the requested layout, and the ranks and devices that run it.

    A keyword without a docstring has the meaning of its setting on the command line, see
    `setting_of`.
    """

    replicas: int | None = PipelineConfig.replicas
    example: tuple[Nest, Nest] | None = None
    """``(inputs, targets)`` of one micro-batch, to measure or count layers; rank 0 needs it."""
    device: str = TrainConfig.device
    timeout_s: float = _COMM.timeout_s
    silence_s: float = _COMM.silence_s
    stall_s: float | None = _COMM.stall_s
    bind: str = "none"  # the process is the user's: its affinity and threads stay unchanged
    num_threads: str | int | None = None
    world: World | None = None
    """The world of ranks. None: join the existing process group, or start one from the launcher's
    environment."""

    def request(self) -> Request:
        """Return the request for a layout on the ranks of the world, with canonical spellings.

        Raises ConfigError.
        """
        assert self.world is not None, "the constructor has joined the world"
        named = {each.name: getattr(self, each.name) for each in fields(Settings)}
        for name, value in named.items():
            setting = setting_of(name)
            if setting is not None and not isinstance(value, Schedule | Partition):
                named[name] = setting.normalised(value, name)
                setting.check(named[name], name)
        named["outer"] = _outer_of(self.outer)
        return Request(**named, replicas=replicas_on(self.world.size, self.stages, self.replicas))


_OTHERWISE: Final = MappingProxyType(
    {"schedule_options": "pipeline.options", "noise_over": "lr.noise_over"}
)


def setting_of(keyword: str) -> Setting | None:
    """Return the setting on the command line for a keyword of `Pipeline`; None if there is none."""
    known = {each.name: each for each in settings_of(Config)}
    names = (f"{section}.{keyword}" for section in ("pipeline", "train", "comm"))
    name = _OTHERWISE.get(keyword) or next((each for each in names if each in known), "")
    return known.get(name)


# Settings of the command line whose keyword has another name.
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
    """Decorate a constructor so that it accepts the fields of `record` as typed keywords."""

    def decorate(make: TakesRecord) -> TakesKeywords[P]:
        own, fields_of_record = signature(make), signature(record).parameters
        positional = list(own.parameters.values())[:-1]

        def init(self: Any, /, *args: Any, **kwargs: Any) -> None:
            with OwnFramesStripped():
                refuse_unfit_torch()
                # First of all, so that a mistake in a keyword is reported once, by one rank.
                world = _world_of(kwargs)
                with collective_errors(world, "start"):
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
    """Return the world given as a keyword, or join one with the other keywords."""
    world: World | None = given.get("world")
    if world is not None:
        return world
    return start_world(**{name: given[name] for name in _OF_WORLD if name in given})


def _model_and_loss(args: Sequence[Any], given: dict[str, Any]) -> tuple[Layers, LossFunction]:
    """Return the layers and the loss, which may be positional or keyword arguments."""
    names = ("layers", "loss_fn")
    found = dict(zip(names, args, strict=False))
    twice = [name for name in found if name in given]
    found |= {name: given.pop(name) for name in names if name in given}
    if len(args) > len(names) or twice or len(found) < len(names):
        got = f"{len(args)} positional argument(s)" + "".join(f", {name} again" for name in twice)
        raise KeywordError(
            f"Pipeline: expected the layers and the loss, and all other arguments by keyword, got "
            f"{got}; write Pipeline(layers, loss_fn, stages=2, microbatches=8)"
        )
    _refuse_no_loss(found["loss_fn"])
    return found["layers"], found["loss_fn"]


def _refuse_no_loss(loss_fn: object) -> None:
    if loss_fn is None:  # the pipeline only predicts
        return
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        got = f"the class {loss_fn.__name__}; create an instance: {loss_fn.__name__}()"
    elif not callable(loss_fn):
        got = f"{type(loss_fn).__name__}; give a function"
    elif not _takes_two(loss_fn):
        taken = signature(_called(loss_fn))
        got = f"a function of {taken}; accept both, and bind others, for example with a lambda"
    elif (known := torch_loss(loss_fn)) is not None and known.reduction == "none":
        got = "one with reduction='none', which returns many numbers; use 'mean' or 'sum'"
    else:
        return
    raise ConfigError(f"loss_fn: expected a function of (output, target), got {got}")


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a call runs: for a module its forward."""
    return function.forward if isinstance(function, nn.Module) else function


def _takes_two(function: Callable[..., Any]) -> bool:
    """Return whether a function accepts two arguments; True if that is unknown."""
    try:
        taken = signature(_called(function))
    except (TypeError, ValueError):  # some functions of torch have no signature
        return True
    try:
        taken.bind(None, None)
    except TypeError:
        return False
    return True


def _outer_of(given: Outer | Mapping[str, Any]) -> Outer:
    """Return the settings of data parallelism from an Outer or a dict; may raise ConfigError."""
    if isinstance(given, Outer):
        return given.checked()
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"outer: expected an Outer or a dict of its settings, got {given!r}; write "
            f"outer={{'compress': 'bfloat16'}}, or leave it out"
        )
    known = [each.name for each in fields(Outer)]
    for name, value in given.items():
        if name not in known:
            raise refusal_of_removed(f"outer.{name}", str(value)) or ConfigError(
                f"outer: unknown setting {name}, expected one of {', '.join(known)}; "
                f"{suggestion(name, known)}correct it"
            )
    return Outer(**given).checked()


def _refuse_unknown(given: Iterable[str], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            meant = _OF_COMMAND_LINE.get(name)
            near = f"did you mean {meant}? " if meant else suggestion(name, known)
            some = "one listed by help(Pipeline)" if near else f"one of {', '.join(known)}"
            raise KeywordError(
                f"Pipeline: unknown keyword {name}, expected {some}, got {name}; {near}correct it"
            )
