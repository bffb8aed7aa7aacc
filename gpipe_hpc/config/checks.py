"""Checks of settings that must fit each other, and warnings about unlikely ones.

Single values are checked by their fields; checks within one section are methods of its dataclass in
`gpipe_hpc.settings`.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import gcd
from typing import Final

from gpipe_hpc.schedule import (
    PartialReplicas,
    in_rows,
    nearest_schedule,
    refuse_whole_replicas,
    replicas_on,
    schedule_names,
)
from gpipe_hpc.settings import (
    Config,
    MicrobatchSplit,
    Outer,
    SGDConfig,
    TokenDataConfig,
    refuse,
    suggestion,
)


def check_config(config: Config, world_size: int, *, may_choose: bool = False) -> list[str]:
    """Raise ConfigError for settings that cannot work; return warnings about unlikely ones.

    Args:
        config: All settings.
        world_size: Number of started processes.
        may_choose: The layout may be searched later (pipeline.layout=auto). Then only settings that
            do not depend on the layout are checked, and no warnings are returned.
    """
    # Here, since the package above loads torch, which composing and drawing do without.
    from gpipe_hpc.comm.world.mesh import Mesh

    check_values(config)
    if not may_choose:
        _refuse_searching(config)
    config = filled(config, world_size)
    _check_device(config)
    _check_portions(config)
    config.metrics.check()
    config.draw.costs.check()
    pipeline, stages = config.pipeline, config.pipeline.stages
    if stages == "fit" or pipeline.is_searched:
        stages = None  # found once the layers are known
    elif stages is None or rows_of(config, world_size) is None:
        stages = Mesh.fit(world_size, stages, pipeline.num_replicas).stages
    _check_sections(config, stages)
    if not pipeline.is_searched:
        _check_outer(config)
    config.data.check()
    _check_model(config)
    return [] if pipeline.is_searched else list(_warnings(config, world_size))


def check_values(config: Config) -> None:
    """Raise ConfigError for a value that is out of range or not among its choices."""
    config.check_values()
    for setting, names in (
        ("pipeline.schedule", [config.pipeline.schedule]),
        ("draw.compare", config.draw.compare),
    ):
        for name in names:
            if name not in schedule_names():
                meant = nearest_schedule(name)
                hint = "" if meant is None else f"did you mean {meant}? "
                known = ", ".join(schedule_names())
                raise refuse(setting, f"one of {known}", name, f"{hint}choose one of them")


def check_drawing(config: Config) -> None:
    """Raise ConfigError for settings with which no schedule can be drawn.

    Settings that only training needs are not checked, and torch is not loaded.
    """
    check_values(config)
    _refuse_searching(config)
    _check_portions(config)
    config.draw.costs.check()


def check_timing(config: Config) -> None:
    """Raise ConfigError for settings that the command bench cannot measure."""
    check_values(config)
    config.bench.check()
    _check_device(config)


def check_planning(config: Config, num_stages: int | None) -> list[str]:
    """Raise ConfigError for settings that cannot be planned; return warnings about unlikely ones.

    The data need not be on this machine.

    Args:
        config: All settings.
        num_stages: Ranks of one pipeline; None if they are searched.
    """
    check_values(config)
    _check_device(config)
    _check_portions(config)
    _check_sections(config, num_stages)
    _check_model(config)
    return list(_empty_microbatches(config))


def _check_sections(config: Config, num_stages: int | None) -> None:
    """Run the checks of each section."""
    config.plan.check()
    config.pipeline.check(num_stages)
    config.outer.check()
    config.optimizer.check()
    config.train.batch_ramp.check(config.train.batch_size)
    config.lr.check()


def _refuse_searching(config: Config) -> None:
    """Raise ConfigError for pipeline.layout=auto in a command that needs a known layout."""
    if config.pipeline.is_searched:
        raise refuse(
            "pipeline.layout",
            "another layout in commands other than train and plan",
            "auto",
            "run python -m gpipe_hpc.plan plan.search=true, and copy the settings that it finds",
        )


def _check_device(config: Config) -> None:
    # Here, since it loads torch, which composing and drawing do without.
    from gpipe_hpc.device.device import KNOWN_KINDS, known_backends, known_kind

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
            "false if outer.weights gives replicas unequal numbers of micro-batches",
            together,
            "some micro-batches would have no counterpart on other replicas; set only one of them",
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
        remedy = "set loss._target_=my.module.loss_fn"
        raise refuse("loss", "a _target_", config.loss, remedy)
    _check_sizes(config)
    # Only if model and data both have tokens: a user's own model has names of its own.
    if isinstance(config.data, TokenDataConfig) and type(model.get("vocab_size")) is int:
        config.data.check_vocabulary(model["vocab_size"])
    for setting, wanted in (("vocab_size", "vocab_size"), ("block_size", "seq_len")):
        size, needed = model.get(setting), getattr(config.data, wanted, None)
        if type(size) is int and needed is not None and size < needed:
            raise refuse(
                f"model.{setting}",
                f"at least data.{wanted}={needed}",
                size,
                f"raise model.{setting} or lower data.{wanted}",
            )


def _check_sizes(config: Config) -> None:
    """Raise ConfigError if sizes of a built-in model and of built-in data differ."""
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
        if may_be_more and (size > needed or config.loss):  # the user's loss may accept fewer
            continue
        if may_be_more and size == 1 and needed <= 2 and data.shapes(1).loss == "segmentation":
            continue  # one logit per pixel
        place = {"width": "first of ", "num_classes": "last of "}.get(wanted, "")
        least = "at least " if may_be_more else ""
        raise refuse(
            setting,
            f"{place if setting == 'model.widths' else ''}{least}data.{wanted}={needed}",
            model[setting.partition(".")[2]],
            f"correct {setting} or data.{wanted}",
        )


def _check_outer(config: Config) -> None:
    """Raise ConfigError for settings that local SGD excludes, and for unfit train.steps."""
    outer, steps = config.outer, config.train.steps
    if config.pipeline.num_replicas == 1 or not outer.uses_local_sgd:
        return
    every = outer.every
    if config.pipeline.normalise_over_replicas:
        raise refuse(
            "pipeline.normalise_over_replicas",
            f"false with outer.every={every}",
            True,
            "it needs all replicas in every micro-batch; leave it out, or use outer=allreduce",
        )
    if config.lr.scaling == "adascale":
        raise refuse(
            "lr.scaling",
            f"linear or sqrt with outer.every={every}",
            "adascale",
            "it compares gradients that replicas sum in every step; use outer=allreduce",
        )
    if steps % every:
        raise refuse(
            "outer.every",
            f"a divisor of train.steps={steps}, so that the run ends with an outer step",
            every,
            f"set outer.every={_near_divisor(steps, every)} or "
            f"train.steps={(steps // every + 1) * every}",
        )


def _near_divisor(number: int, wanted: int) -> int:
    """Return the divisor of `number` nearest to `wanted`, or any if none is within 1000."""
    near = (each for gap in range(1000) for each in (wanted - gap, wanted + gap))
    return next((each for each in near if each > 0 and number % each == 0), gcd(number, wanted))


def _warnings(config: Config, world_size: int) -> Iterator[str]:
    train = config.train
    if config.pipeline.ranks not in (None, world_size):
        yield (
            f"config: pipeline.ranks={config.pipeline.ranks} is only used by commands that start "
            f"no ranks; this run has {world_size} ranks"
        )
    if config.lr.scaling == "adascale" and not isinstance(config.optimizer, SGDConfig):
        yield (
            "config: lr.scaling=adascale is derived for optimizer=sgd; with another optimizer its "
            "gain is only an estimate"
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
            f"config: trace.from_step={config.trace.from_step} is after the last step, {last}; "
            f"no step is traced"
        )
    if train.stop_at is not None and train.stop_at > train.steps:
        yield (
            f"config: train.stop_at={train.stop_at} is greater than train.steps={train.steps} and "
            f"is ignored"
        )
    yield from _outer_warnings(config)
    yield from _empty_microbatches(config)
    yield from _unused_vocabulary(config)


_MUCH_LARGER: Final = 4  # times the data's vocabulary; some pad it to a round number


def _unused_vocabulary(config: Config) -> Iterator[str]:
    size = config.model.get("vocab_size")
    if type(size) is not int or not isinstance(config.data, TokenDataConfig):
        return
    used = config.data.num_tokens
    if size >= _MUCH_LARGER * used:
        yield (
            f"config: model.vocab_size={size} is far more than the {used} tokens of the "
            f"data (data.vocab_size={config.data.vocab_size}); the other rows waste memory and "
            f"time, unless pretrained weights need them: set model.vocab_size={used}, or correct "
            f"data.vocab_size"
        )


def _outer_warnings(config: Config) -> Iterator[str]:
    every, validates = config.outer.every, config.train.validate_every
    for each in config.outer.unused():
        yield f"config: {each}; it has no effect"
    if config.pipeline.num_replicas == 1:
        yield from _idle_outer(config)
    elif every and validates % every:
        yield (
            f"config: train.validate_every={validates} is not a multiple of outer.every={every}; "
            f"between outer steps, validation results are means over the models of all replicas"
        )


def _idle_outer(config: Config) -> Iterator[str]:
    """Yield a warning for each outer setting that has no effect with one replica."""
    every = config.outer.every
    if every:
        yield f"config: outer.every={every} has no effect with pipeline.replicas=1"
    plain = Outer()
    for name in ("hierarchy", "order", "compress", "shard"):
        value = getattr(config.outer, name)
        if value != getattr(plain, name):
            yield (
                f"config: outer.{name}={value} has no effect with pipeline.replicas=1, unless the "
                f"schedule is mirrored"
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


def filled(config: Config, num_ranks: int) -> Config:
    """Return the settings with pipeline.replicas set, from the number of ranks if necessary."""
    pipeline = config.pipeline
    replicas = replicas_on(num_ranks, pipeline.stages, pipeline.replicas)
    return replace(config, pipeline=replace(pipeline, replicas=replicas))


def rows_of(config: Config, num_ranks: int) -> PartialReplicas | None:
    """Return how pipelines of unequal length run on these ranks; None if all have equal length.

    Raises ConfigError for settings that need pipelines of equal length.
    """
    pipeline, outer = config.pipeline, config.outer
    if pipeline.stages is None or pipeline.stages == "fit":
        return None
    rows = in_rows(
        num_ranks,
        pipeline.stages,
        pipeline.num_replicas,
        pipeline.microbatches,
        pipeline.schedule,
        pipeline.options,
    )
    if rows is None:
        return None
    asked = {
        "pipeline.normalise_over_replicas": pipeline.normalise_over_replicas,
        "outer.every": outer.every,
        "outer.weights": outer.weights,
        "lr.noise_over": config.lr.scaling == "adascale" and config.lr.noise_over == "replicas",
    }
    refuse_whole_replicas(num_ranks, pipeline.stages, asked)
    return rows


def on_ranks(config: Config, num_ranks: int) -> Config:
    """Return the settings of a run on `num_ranks` ranks, with pipeline.replicas set.

    Pipelines of unequal length are expressed as one pipeline over all ranks.
    """
    config = filled(config, num_ranks)
    rows = rows_of(config, num_ranks)
    if rows is None:
        return config
    pipeline = replace(
        config.pipeline,
        stages=rows.ranks,
        replicas=1,
        microbatches=rows.microbatches,
        schedule=rows.schedule,
        options=rows.options,
    )
    return replace(config, pipeline=pipeline)


def num_planned_ranks(config: Config, default_stages: int) -> int:
    """Return the number of ranks that a run would have, for commands that start no ranks.

    Raises ConfigError for pipeline.stages=fit without pipeline.ranks.
    """
    pipeline = config.pipeline
    if pipeline.stages == "fit" and pipeline.ranks is None:
        raise refuse(
            "pipeline.ranks",
            "the number of ranks that the stages are to fit (pipeline.stages=fit)",
            None,
            "set it, as pipeline.ranks=7",
        )
    return pipeline.ranks or (pipeline.stages or default_stages) * pipeline.num_replicas


def portions_of(config: Config) -> MicrobatchSplit:
    """Return the number of micro-batches of each replica in one step, over all accumulation passes.

    Raises ConfigError if outer.weights do not divide the micro-batches.
    """
    pipeline = config.pipeline
    count = pipeline.microbatches * config.train.accumulation
    return MicrobatchSplit.divide(count, pipeline.num_replicas, config.outer.weights)
