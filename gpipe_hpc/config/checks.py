"""Which settings cannot work, alone or together, and which hardly make sense."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

from gpipe_hpc.comm.failing.timeouts import MAX_TIMEOUT_S
from gpipe_hpc.config.data import TokenDataConfig, mask_token_of, num_tokens_of
from gpipe_hpc.config.data_checks import DATA_CHOICES, DATA_RANGES
from gpipe_hpc.config.portions import portions_of
from gpipe_hpc.config.ranks import filled, rows_of
from gpipe_hpc.config.refusal import refuse
from gpipe_hpc.config.schema import (
    AUTO_LAYOUT,
    COSTS,
    Config,
    OuterConfig,
    PipelineConfig,
    PlanConfig,
    SGDConfig,
    TrainConfig,
)
from gpipe_hpc.config.spelling import suggestion
from gpipe_hpc.config.tracker_names import TRACKERS
from gpipe_hpc.data_parallel import Outer
from gpipe_hpc.schedule import nearest_schedule, schedule_names

_INF: Final = math.inf

_LARGEST: Final = 2**63 - 1  # of an integer of torch

# Setting -> (least, most). Settings that a chosen group lacks, and nulls, are passed over.
RANGES: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        "draw.buckets": (1, 10_000),
        "pipeline.stages": (1, _INF),
        "pipeline.ranks": (1, _INF),
        "pipeline.replicas": (1, _INF),
        "pipeline.microbatches": (1, _INF),
        "train.steps": (0, _INF),
        "train.stop_at": (0, _INF),
        "train.batch_size": (1, _INF),
        "train.batch_ramp.start": (1, _INF),
        "train.batch_ramp.steps": (0, _INF),
        "train.batch_ramp.increment": (1, _INF),
        "train.accumulation": (1, _INF),
        "train.seed": (0, 2**64 - 1),
        "train.validate_every": (0, _INF),
        "train.validate_batches": (1, _INF),
        "train.log_every": (1, _INF),
        "train.num_threads": (1, _INF),
        "comm.silence_s": (3, _INF),  # of beats a second apart
        "optimizer.lr": (0, _INF),
        "optimizer.weight_decay": (0, _INF),
        "optimizer.eps": (0, _INF),
        "optimizer.momentum": (0, 1),
        "optimizer.alpha": (0, 1),
        "optimizer.trust": (0, _INF),
        "lr.warmup_steps": (0, _INF),
        "lr.start_ratio": (0, _INF),
        "lr.base_batch_size": (1, _INF),
        "lr.smoothing": (0, 1),
        "lr.min_ratio": (0, 1),
        "checkpoint.every": (0, _INF),
        "checkpoint.keep": (1, _INF),
        "checkpoint.neighbour_every": (0, _INF),
        "trace.steps": (0, 10_000),
        "trace.from_step": (1, _INF),
        "trace.review_after": (0, _INF),
        "draw.width": (1, 100_000),
        "plan.flops_per_s": (1, _INF),
        "plan.memory_bytes_per_s": (1, _INF),
        "plan.link_bytes_per_s": (1, _INF),
        "plan.ranks": (1, 65_536),
        "plan.hosts": (1, 65_536),
        "plan.link_latency_s": (0, 1000),
        "plan.within_bytes_per_s": (1, _INF),
        "plan.within_latency_s": (0, 1000),
        "plan.host_copy_bytes_per_s": (1, _INF),
        "plan.layer_s": (0, 1000),
        "plan.shown": (1, 1000),
        "train.device_flops_per_s": (1, _INF),
        "preflight.bytes": (1, 2**30),
        "verify.steps": (1, _INF),
        "bench.steps": (1, _INF),
        "bench.limit_s": (1, _INF),
        "pipeline.memory_bytes": (1, _INF),
        "outer.bucket_bytes": (1, _INF),
        "outer.powersgd_rank": (1, _INF),
        "outer.topk_fraction": (1e-9, 0.5),
        "outer.qsgd_levels": (7, 127),
        "outer.every": (1, _INF),
        "outer.lr": (0, _INF),
        "outer.momentum": (0, 1),
        "outer.parts": (1, _INF),
        "outer.behind": (0, _INF),
        "outer.mix": (0, 1),
        **DATA_RANGES,
    }
)

CHOICES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "pipeline.schedule": schedule_names(),
        "pipeline.buffers": ("average", "first", "each"),
        "pipeline.layout": ("given", AUTO_LAYOUT),
        "pipeline.recompute": ("always", "except_last", "never", "budget"),
        "outer.order": Outer.CHOICES["order"],
        "outer.compress": Outer.CHOICES["compress"],
        "outer.shard": Outer.CHOICES["shard"],
        "train.bind": ("auto", "none"),
        "train.precision": ("float32", "bfloat16", "float16"),
        "checkpoint.data": ("same", "new", "any"),
        "lr.decay": ("cosine", "constant"),
        "lr.scaling": ("linear", "sqrt", "adascale"),
        "lr.noise_over": ("microbatches", "replicas"),
        "trace.keep": ("median", "all"),
        "plan.costs": COSTS,
        "draw.format": ("auto", "text", "svg", "png", "html", "trace", "table"),
        "report.format": ("auto", "html", "markdown"),
        **DATA_CHOICES,
    }
)
_CHOSEN_LATER: Final = "where stages are to be found (pipeline.stages=fit, pipeline.layout=auto)"
_ABOVE_ZERO: Final = ("comm.timeout_s", "comm.stall_s", "comm.reach_s", "preflight.limit_s")
_NONE_IS_OFF: Final = ("train.clip_norm", "train.stop_grace_s")
_PARTITIONS: Final = ("time", "parameters", "uniform", "simulated")


def check_config(config: Config, world_size: int, *, may_choose: bool = False) -> list[str]:
    """Refuse settings that cannot work; return warnings about those that hardly make sense.

    `world_size` is the number of started processes. `may_choose`: the layout may still be to be
    found (pipeline.layout=auto); then only what does not hang on it is looked at, and nothing is
    warned of. Raises ConfigError that names the setting.
    """
    # Here, since the package above loads torch, which composing and drawing do without.
    from gpipe_hpc.comm.mesh import Mesh

    check_ranges(config)
    _check_choices(config)
    if not may_choose:
        _refuse_choosing(config)
    config = filled(config, world_size)
    _check_precisions(config.plan)
    _check_device(config)
    _check_portions(config)
    _check_trackers(config)
    _check_draw(config)
    stages, is_chosen = config.pipeline.stages, config.pipeline.layout == AUTO_LAYOUT
    if stages == "fit" or is_chosen:
        stages = None  # found where the layers are known
    elif stages is None or rows_of(config, world_size) is None:
        stages = Mesh.fit(world_size, stages, config.pipeline.num_replicas).stages
    _check_partition(config.pipeline.partition, stages)
    _check_budget(config.pipeline)
    _check_paces(config.pipeline.paces)
    _check_optimizer(config)
    _check_batches(config)
    if not is_chosen:
        _check_outer(config)
    config.data.check()
    _check_model(config)
    return [] if is_chosen else list(_doubts(config, world_size))


def _refuse_choosing(config: Config) -> None:
    """Refuse to look for a layout where the command is about one that is known."""
    if config.pipeline.layout == AUTO_LAYOUT:
        raise refuse(
            "pipeline.layout",
            "given in commands other than train and plan",
            AUTO_LAYOUT,
            "let python -m gpipe_hpc.plan plan.search=true find one, and paste its settings",
        )


def check_drawing(config: Config) -> None:
    """Refuse settings with which nothing can be drawn; raises ConfigError that names one.

    What only training needs is left unchecked, and torch unloaded.
    """
    check_ranges(config)
    _check_choices(config)
    _refuse_choosing(config)
    _check_portions(config)
    _check_draw(config)


def check_timing(config: Config) -> None:
    """Refuse settings with which nothing can be timed; raises ConfigError that names one."""
    check_ranges(config)
    _check_choices(config)
    _check_device(config)


def check_report(config: Config) -> None:
    """Refuse settings with which nothing can be told; raises ConfigError that names one."""
    check_ranges(config)
    _check_choices(config)
    if config.run.dir is None and not config.report.runs:
        raise refuse(
            "run.dir", "the folder of a run", None, "set it, or report.runs=[A,B] for several"
        )
    if config.run.dir is not None and config.report.runs:
        raise refuse("report.runs", "nothing beside run.dir", config.report.runs, "set one of them")


def check_planning(config: Config, num_stages: int | None) -> list[str]:
    """Refuse settings with which nothing can be planned; return warnings about odd ones.

    `num_stages` is the number of ranks of one pipeline, None if it is to be found. Data need not be
    there. Raises ConfigError that names a setting.
    """
    check_ranges(config)
    _check_choices(config)
    _check_precisions(config.plan)
    _check_device(config)
    _check_portions(config)
    _check_partition(config.pipeline.partition, num_stages)
    _check_budget(config.pipeline)
    _check_paces(config.pipeline.paces)
    _check_optimizer(config)
    _check_batches(config)
    _check_model(config)
    return list(_empty_microbatches(config))


def _check_precisions(plan: PlanConfig) -> None:
    """Refuse precisions that no run has, rates that are none, and those of no search."""
    known = CHOICES["train.precision"]
    for name, rate in plan.precisions.items():
        is_rate = isinstance(rate, int | float) and not isinstance(rate, bool) and rate >= 1
        if name not in known or not (rate is None or is_rate):
            raise refuse(
                "plan.precisions",
                f"{', '.join(known)}, each with the FLOPs a second of a rank or null",
                plan.precisions,
                "write it as {float32: 6e13, bfloat16: 4e14}",
            )
    if plan.precisions and not plan.search:
        raise refuse(
            "plan.precisions",
            "empty where nothing is searched",
            plan.precisions,
            "set plan.search=true, or train.precision alone",
        )


def _value(config: Config, setting: str) -> Any:
    try:
        return attrgetter(setting)(config)
    except AttributeError:
        return None


def _whole_numbers(section: object, prefix: str) -> Iterator[tuple[str, int]]:
    """Yield the settings below `section` that are whole numbers; not keywords of functions."""
    if isinstance(section, int):
        yield prefix, section
    elif isinstance(section, list | tuple):
        for index, value in enumerate(section):
            yield from _whole_numbers(value, f"{prefix}[{index}]")
    elif is_dataclass(section):
        for name, value in vars(section).items():
            yield from _whole_numbers(value, f"{prefix}.{name}" if prefix else name)


def check_ranges(config: Config) -> None:
    """Refuse numbers outside of what a setting can be."""
    for setting, (least, most) in RANGES.items():
        value = _value(config, setting)
        if isinstance(value, int):
            most = min(most, _LARGEST)
        each = value if isinstance(value, list) else [value]
        if all(
            one is None or isinstance(one, str) or (least <= one <= most and math.isfinite(one))
            for one in each
        ):
            continue
        bounded = most != _INF and (most != _LARGEST or value > most)
        expected = f"{least} to {most}" if bounded else f"at least {least}"
        raise refuse(setting, expected, value, f"set {setting} within it")
    for setting, number in _whole_numbers(config, ""):
        if not -_LARGEST <= number <= _LARGEST:
            raise refuse(setting, f"{-_LARGEST} to {_LARGEST}", number, f"correct {setting}")
    # Open at zero: no time to wait and no norm at all would stop every run.
    for setting in (*_ABOVE_ZERO, *_NONE_IS_OFF):
        value = _value(config, setting)
        if value is not None and not (value > 0 and math.isfinite(value)):
            off = ", or null for none" if setting in _NONE_IS_OFF else ""
            raise refuse(setting, "more than 0", value, f"set {setting} above it{off}")
    for name, value in vars(config.comm).items():
        if name.endswith("_s") and value is not None and not value <= MAX_TIMEOUT_S:
            raise refuse(
                f"comm.{name}",
                f"at most {MAX_TIMEOUT_S:.0f} seconds",
                value,
                f"lower comm.{name}: no wait can be told to take longer",
            )


def _check_choices(config: Config) -> None:
    for setting, choices in CHOICES.items():
        value = _value(config, setting)
        if value is not None and value not in choices:
            is_schedule = setting == "pipeline.schedule"
            hint = _meant(value) if is_schedule else suggestion(value, choices)
            remedy = f"{hint}choose one of them"
            raise refuse(setting, f"one of {', '.join(choices)}", value, remedy)


def _check_trackers(config: Config) -> None:
    names = config.metrics.to
    for name in names:
        if name not in TRACKERS:
            remedy = f"{suggestion(name, TRACKERS)}choose among them"
            raise refuse("metrics.to", f"a list of {', '.join(TRACKERS)}", names, remedy)
    if len(set(names)) < len(names):
        raise refuse("metrics.to", "each tracker once", names, "leave one of both out")


def _check_device(config: Config) -> None:
    # Here, since it loads torch, which composing and drawing do without.
    from gpipe_hpc.comm.device import KNOWN_KINDS, known_backends, known_kind

    device, backend = config.train.device, config.comm.backend
    if device != "auto" and known_kind(device) is None:
        remedy = f"{suggestion(device, ['auto', 'cpu', 'cuda', 'xpu'])}choose one of them"
        raise refuse("train.device", f"auto, {KNOWN_KINDS}", device, remedy)
    backends = ["auto", "mpi", *known_backends()]
    if backend not in backends:
        remedy = f"{suggestion(backend, backends)}choose one of them"
        raise refuse("comm.backend", f"one of {', '.join(backends)}", backend, remedy)


def _check_portions(config: Config) -> None:
    portions = portions_of(config)
    together = config.pipeline.normalise_over_replicas
    if together and not portions.are_equal:
        raise refuse(
            "pipeline.normalise_over_replicas",
            "false where outer.weights gives replicas unequal numbers of micro-batches",
            together,
            "there is none of each other replica to normalise each with; leave one of both out",
        )


def _check_draw(config: Config) -> None:
    """Check costs and names of further schedules; a cost's number of stages the schedule knows."""
    for name, cost in vars(config.draw.costs).items():
        numbers = cost if isinstance(cost, list) else [cost]
        optional = name == "backward" and cost is None
        if not optional and not (numbers and all(map(_is_time, numbers))):
            raise refuse(
                f"draw.costs.{name}",
                "a time of 0 or more, or a list of one for each stage",
                cost,
                f"write it as draw.costs.{name}=1.5 or [1,1.5]",
            )
    for name in config.draw.compare:
        if name not in schedule_names():
            known = ", ".join(schedule_names())
            remedy = f"{_meant(name)}choose among them"
            raise refuse("draw.compare", f"names out of {known}", name, remedy)


def _meant(name: str) -> str:
    """Return ``did you mean NAME? `` of a schedule, which goes by several names; or nothing."""
    meant = nearest_schedule(name)
    return "" if meant is None else f"did you mean {meant}? "


def _is_time(number: object) -> bool:
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    return 0 <= number < _INF


def _check_budget(pipeline: PipelineConfig) -> None:
    if pipeline.recompute == "budget" and pipeline.memory_bytes is None:
        raise refuse(
            "pipeline.memory_bytes",
            "the bytes that a rank may use, for pipeline.recompute=budget",
            None,
            "set it, as pipeline.memory_bytes=16e9, or choose another pipeline.recompute",
        )


def _check_paces(paces: object) -> None:
    """Refuse what tells of no rank how slow it is."""
    if paces is None or paces == "measured":
        return
    if (
        not isinstance(paces, list)
        or not paces
        or not all(_is_time(pace) and pace for pace in paces)
    ):
        raise refuse(
            "pipeline.paces",
            "measured, or a number above 0 for each rank of a pipeline",
            paces,
            "write it as pipeline.paces=[1,1,2]",
        )


def _check_partition(partition: object, num_stages: int | None) -> None:
    """Refuse what is no cut into stages; None: how many they are is not known yet."""
    if isinstance(partition, str) and partition in _PARTITIONS:
        return
    if num_stages is None:
        raise refuse(
            "pipeline.partition",
            f"{', '.join(_PARTITIONS)} {_CHOSEN_LATER}",
            partition,
            "set pipeline.stages to as many, or leave it out",
        )
    expected = f"{', '.join(_PARTITIONS)} or the number of layers of each stage"
    if not isinstance(partition, list) or not all(type(count) is int for count in partition):
        raise refuse(
            "pipeline.partition", expected, partition, "write it as pipeline.partition=[5,6]"
        )
    if not partition or len(partition) % num_stages or min(partition) < 0 or not any(partition):
        raise refuse(
            "pipeline.partition",
            f"{num_stages} (or, with several stages a rank, a multiple) layer counts from 0 up",
            partition,
            "give each stage a count, or pipeline.partition=time",
        )


def _check_optimizer(config: Config) -> None:
    betas = _value(config, "optimizer.betas")
    if betas is not None and not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
        raise refuse("optimizer.betas", "two numbers, 0 <= beta < 1", betas, "as [0.9,0.95]")
    sgd = config.optimizer
    if isinstance(sgd, SGDConfig) and sgd.nesterov and not sgd.momentum:
        raise refuse("optimizer.nesterov", "false without momentum", True, "set momentum above 0")


def _check_batches(config: Config) -> None:
    """Check what goes with large batches: the ramp, and AdaScale."""
    _check_ramp(config.train)
    if config.lr.scaling != "adascale":
        return
    if config.lr.base_batch_size is None:
        raise refuse(
            "lr.base_batch_size",
            "the samples of the batch that optimizer.lr is meant for, with lr.scaling=adascale",
            None,
            "set it, as lr.base_batch_size=32",
        )
    if config.lr.smoothing is not None and config.lr.smoothing >= 1:
        raise refuse(
            "lr.smoothing", "less than 1, or null", config.lr.smoothing, "0.9 looks back ten steps"
        )


def _check_ramp(train: TrainConfig) -> None:
    ramp = train.batch_ramp
    if ramp.start is None:
        return
    if ramp.start > train.batch_size:
        raise refuse(
            "train.batch_ramp.start",
            f"at most train.batch_size={train.batch_size}, which the batch grows to",
            ramp.start,
            "raise train.batch_size or lower train.batch_ramp.start",
        )
    if ramp.steps < 1:
        raise refuse(
            "train.batch_ramp.steps",
            f"the number of steps over which the batch grows from {ramp.start} to "
            f"{train.batch_size} samples",
            ramp.steps,
            "set it, as train.batch_ramp.steps=1000, or train.batch_ramp.start=null for no ramp",
        )


def _check_model(config: Config) -> None:
    model = config.model
    if not isinstance(model.get("_target_"), str):
        raise refuse(
            "model",
            "a _target_",
            model.get("_target_"),
            "choose a model=... of conf/model, or model._target_=my.module.build",
        )
    if config.loss and not isinstance(config.loss.get("_target_"), str):
        raise refuse("loss", "a _target_", config.loss, "as loss._target_=my.module.loss_fn")
    _check_sizes(config)
    # Only where model and data both speak of tokens: a user's own model names what it likes.
    for setting, wanted in (("vocab_size", "vocab_size"), ("block_size", "seq_len")):
        size, needed = model.get(setting), _value(config, f"data.{wanted}")
        if setting == "vocab_size" and isinstance(config.data, TokenDataConfig):
            _check_mask(size, config.data)
        if type(size) is int and needed is not None and size < needed:
            raise refuse(
                f"model.{setting}",
                f"at least data.{wanted}={needed}",
                size,
                f"raise model.{setting} or lower data.{wanted}",
            )


def _check_sizes(config: Config) -> None:
    """Refuse sizes of a model of ours that are not those of data of a kind of ours."""
    model, data = config.model, config.data
    if not str(model.get("_target_")).startswith("gpipe_hpc.models."):
        return
    if not type(data).__module__.startswith("gpipe_hpc."):
        return
    widths = model.get("widths")
    ends = widths if isinstance(widths, list) and widths else [None]
    for setting, size, wanted, may_be_more in (
        ("model.num_classes", model.get("num_classes"), "num_classes", True),
        ("model.widths", ends[-1], "num_classes", True),
        ("model.widths", ends[0], "width", False),
        ("model.in_channels", model.get("in_channels"), "channels", False),
    ):
        needed = getattr(data, wanted, None)
        if type(size) is not int or type(needed) is not int or size == needed:
            continue
        if may_be_more and (size > needed or config.loss):  # his own loss may take fewer
            continue
        if may_be_more and size == 1 and needed <= 2 and data.shapes(1).loss == "segmentation":
            continue  # a yes or no for each pixel
        place = {"width": "first of ", "num_classes": "last of "}.get(wanted, "")
        least = "at least " if may_be_more else ""
        raise refuse(
            setting,
            f"{place if setting == 'model.widths' else ''}{least}data.{wanted}={needed}",
            model[setting.partition(".")[2]],
            f"correct {setting} or data.{wanted}",
        )


def _check_mask(model_size: object, data: TokenDataConfig) -> None:
    if type(model_size) is int and data.vocab_size <= model_size < num_tokens_of(data):
        raise refuse(
            "data.mask_token",
            f"less than model.vocab_size={model_size}",
            mask_token_of(data),
            f"give the token that stands for a mask, or set model.vocab_size={num_tokens_of(data)}",
        )


def _check_outer(config: Config) -> None:
    """Refuse settings that do not go together, and a run that would end between outer steps."""
    outer, steps = Outer.of(config.outer), config.train.steps
    if config.pipeline.num_replicas == 1 or not outer.uses_local_sgd:
        return
    every = outer.every
    if config.pipeline.normalise_over_replicas:
        raise refuse(
            "pipeline.normalise_over_replicas",
            f"false where replicas train apart (outer.every={every})",
            True,
            "it joins them in every micro-batch; leave it out, or use outer=allreduce",
        )
    if config.lr.scaling == "adascale":
        raise refuse(
            "lr.scaling",
            f"linear or sqrt where replicas train apart (outer.every={every})",
            "adascale",
            "it compares gradients that replicas sum in every step; use outer=allreduce for it",
        )
    if steps % every:
        raise refuse(
            "outer.every",
            f"a divisor of train.steps={steps}, so that the run ends with an outer step",
            every,
            f"set outer.every={_nearest_divisor(steps, every)} or "
            f"train.steps={(steps // every + 1) * every}",
        )


def _nearest_divisor(number: int, wanted: int) -> int:
    return min(
        (each for each in range(1, number + 1) if number % each == 0),
        key=lambda each: abs(each - wanted),
    )


def _doubts(config: Config, world_size: int) -> Iterator[str]:
    train = config.train
    if config.pipeline.ranks not in (None, world_size):
        yield (
            f"config: pipeline.ranks={config.pipeline.ranks} is for commands that start no ranks; "
            f"{world_size} came, and the run takes these"
        )
    if config.lr.scaling == "adascale" and not isinstance(config.optimizer, SGDConfig):
        yield (
            "config: lr.scaling=adascale is derived for optimizer=sgd; with another optimizer its "
            "gain is a guess"
        )
    ramp = train.batch_ramp
    if ramp.start is not None and ramp.steps > train.steps:
        yield (
            f"config: train.batch_ramp.steps={ramp.steps} is longer than train.steps="
            f"{train.steps}; the batch never grows to train.batch_size"
        )
    if config.lr.warmup_steps > train.steps > 0:
        yield (
            f"config: lr.warmup_steps={config.lr.warmup_steps} is longer than "
            f"train.steps={train.steps}; the learning rate never reaches optimizer.lr"
        )
    last = train.steps if train.stop_at is None else min(train.steps, train.stop_at)
    if config.trace.from_step is not None and config.trace.steps and config.trace.from_step > last:
        yield (
            f"config: trace.from_step={config.trace.from_step} lies after the last step, {last}; "
            f"no step is traced"
        )
    if train.stop_at is not None and train.stop_at > train.steps:
        yield (
            f"config: train.stop_at={train.stop_at} lies after train.steps={train.steps} and is "
            f"ignored"
        )
    yield from _outer_doubts(config)
    yield from _empty_microbatches(config)
    yield from _unused_vocabulary(config)


_MUCH_LARGER: Final = 4  # times the data's vocabulary; a few more rows make a size even


def _unused_vocabulary(config: Config) -> Iterator[str]:
    size = config.model.get("vocab_size")
    if type(size) is not int or not isinstance(config.data, TokenDataConfig):
        return
    used = num_tokens_of(config.data)
    if size >= _MUCH_LARGER * used:
        yield (
            f"config: model.vocab_size={size} is far more than the {used} tokens that the data "
            f"have (data.vocab_size={config.data.vocab_size}); the rows of the others take memory "
            f"and time for nothing, unless the model knows them from elsewhere: set "
            f"model.vocab_size={used}, or correct data.vocab_size"
        )


def _outer_doubts(config: Config) -> Iterator[str]:
    every, validates = getattr(config.outer, "every", 0), config.train.validate_every
    for each in Outer.of(config.outer).unused():
        yield f"config: {each}; it does nothing"
    if config.pipeline.num_replicas == 1:
        yield from _idle_outer(config)
    elif every and validates % every:
        yield (
            f"config: train.validate_every={validates} is no multiple of outer.every={every}; "
            f"between outer steps a validation is the mean over the replicas' own models"
        )


def _idle_outer(config: Config) -> Iterator[str]:
    """Yield a doubt for each outer setting that has no effect with one replica."""
    every = getattr(config.outer, "every", 0)
    if every:
        yield (
            f"config: outer.every={every} is for several replicas, and pipeline.replicas is 1; the "
            f"run trains as ever"
        )
    plain = OuterConfig()
    for name in ("hierarchy", "order", "compress", "shard"):
        value = getattr(config.outer, name)
        if value != getattr(plain, name):
            yield (
                f"config: outer.{name}={value} is for several copies of a stage, and "
                f"pipeline.replicas is 1; without a mirrored schedule it does nothing"
            )


def _empty_microbatches(config: Config) -> Iterator[str]:
    train, pipeline = config.train, config.pipeline
    num_microbatches = pipeline.num_replicas * train.accumulation * pipeline.microbatches
    start = train.batch_ramp.start
    name, smallest = "train.batch_size", train.batch_size
    if start is not None and start < train.batch_size:
        name, smallest = "train.batch_ramp.start", start
    if smallest < num_microbatches:
        yield (
            f"config: {name}={smallest} is less than replicas x accumulation x "
            f"microbatches = {num_microbatches}; some micro-batches stay empty"
        )
