"""Each setting accepts the values that its field allows, and no others."""

import math
from copy import deepcopy
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path

import pytest

from gpipe_hpc.errors import ConfigError
from gpipe_hpc.settings import (
    OPTIMIZERS,
    Config,
    ImageDataConfig,
    Outer,
    Setting,
    TokenDataConfig,
    settings_of,
)

CONFIGS = [
    Config(),
    *(Config(optimizer=kind()) for kind in OPTIMIZERS.values()),
    Config(data=TokenDataConfig()),
    Config(data=ImageDataConfig()),
]
# Each setting by name, with a config that contains it.
SETTINGS = {
    setting.name: (setting, config)
    for config in CONFIGS
    for group in fields(Config)
    for setting in (
        settings_of(type(getattr(config, group.name)), f"{group.name}.")
        if not isinstance(getattr(config, group.name), dict)
        else ()
    )
}
LIMITS = Path(__file__).parent / "limits.txt"


def with_value(name, value):
    """Return a config in which one setting has another value."""
    config = deepcopy(SETTINGS[name][1])
    section, _, field = name.rpartition(".")
    setattr(attrgetter(section)(config), field, value)
    return config


def is_rejected(name, value):
    """Return whether a value is rejected; assert that the error names the setting and a remedy."""
    try:
        with_value(name, value).check_values()
    except ConfigError as error:
        assert f"bad {name}, expected" in str(error) and "; " in str(error)
        return True
    return False


def test_ranges_and_choices_match_the_limits_file():
    """Otherwise a lost range would go unnoticed: other tests read ranges from the fields."""
    lines = [
        f"{name}: {setting.range or setting.choices}"
        for name, (setting, _) in sorted(SETTINGS.items())
        if setting.range or setting.choices
    ]
    assert LIMITS.read_text("utf-8").splitlines() == lines


@pytest.mark.parametrize("name", [n for n, (s, _) in SETTINGS.items() if s.range])
def test_numbers_are_accepted_up_to_their_bounds(name):
    setting = SETTINGS[name][0]
    least, most = setting.range.least, setting.range.most
    step = 1 if setting.plain_kind is int else 1e-9 * max(1.0, abs(least))
    assert is_rejected(name, least) is setting.range.excludes_least
    assert is_rejected(name, least - step)
    assert is_rejected(name, math.nan) and is_rejected(name, math.inf)
    if most < 2**63:
        assert is_rejected(name, most) is setting.range.excludes_most
        assert is_rejected(name, most * 2)
    assert not is_rejected(name, None) or setting.default is not None


@pytest.mark.parametrize("name", [n for n, (s, _) in SETTINGS.items() if s.choices])
def test_choices_pass_in_any_case_and_other_names_are_rejected(name):
    setting = SETTINGS[name][0]
    for choice in setting.choices.names:
        given = [choice.upper()] if setting.plain_kind is list else choice.upper()
        config = with_value(name, given)
        config.normalise()
        config.check_values()
    unknown = setting.choices.names[-1] + "x"
    assert is_rejected(name, [unknown] if setting.plain_kind is list else unknown)


@pytest.mark.parametrize("number", [2**63, -(2**63)])
def test_integer_at_the_64_bit_limit_is_rejected(number):
    """Regression: a data seed of 31 digits ended in NumPy's OverflowError."""
    with pytest.raises(ConfigError, match=r"bad anything, expected .*9223372036854775807"):
        Setting("anything", int).check(number)


def test_stable_settings_exist_and_each_level_has_settings():
    """Users' scripts rely on these names (design.md, section 6)."""
    known = {each.name for each in settings_of(Config)}
    stable = {
        "pipeline": "stages replicas microbatches schedule options recompute partition layout pins "
        "memory_bytes",
        "train": "steps stop_at batch_size accumulation seed precision device",
        "checkpoint": "every resume",
        "comm": "timeout_s",
        "outer": "shard hierarchy bucket_bytes compress every weights overlap",
        "plan": "search ranks hosts links calibration",
        "draw": "format out compare buckets costs.forward",
        "bench": "workloads",
        "lr": "warmup_steps decay",
        "run": "dir",
    }
    names = {f"{section}.{name}" for section, own in stable.items() for name in own.split()}
    assert names | {"model", "loss"} <= known
    assert {each.level.value for each in settings_of(Config)} == {"everyday", "cluster", "expert"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"every": 0, "lr": 0.5}, r"outer\.lr, expected the default without outer\.every"),
        ({"every": 4, "lr": 0.0}, r"outer\.lr, expected more than 0"),
        ({"every": 4, "momentum": 1.0}, r"outer\.momentum, expected 0 or more, less than 1"),
        ({"every": 4, "mix": 1.0, "behind": 1}, r"outer\.mix, expected 0 or more, less than 1"),
        ({"every": 4, "nesterov": True}, r"outer\.nesterov, expected false without momentum"),
        ({"every": 4, "parts": 5}, r"outer\.parts, expected 1 to outer\.every=4"),
        ({"every": 4, "behind": 4}, r"outer\.behind, expected 0 to 3"),
        ({"every": 4, "shard": "flat"}, r"outer\.shard, expected none with outer\.every=4"),
        ({"shard": "flat", "compress": "topk"}, r"outer\.shard=flat gives each replica a part"),
        ({"order": "rank", "compress": "topk"}, r"outer\.order=rank and outer\.compress=topk can"),
        ({"hierarchy": 0}, r"outer\.hierarchy, expected none, host or a number"),
        ({"hierarchy": True}, r"outer\.hierarchy, expected none, host or a number"),
        ({"weights": [1, 0]}, r"outer\.weights, expected at least 1, got \[1, 0\]"),
        ({"weights": [1, 1.5]}, r"outer\.weights, expected a whole number"),
        ({"overlap": 1}, r"outer\.overlap, expected true or false, got 1"),
        ({"every": 2.5}, r"outer\.every, expected a whole number, got 2\.5"),
        ({"topk_fraction": 0.6}, r"outer\.topk_fraction, expected 1e-09 to 0\.5, got 0\.6"),
        ({"bucket_bytes": 0}, r"outer\.bucket_bytes, expected more than 0"),
        ({"compress": "gzip"}, r"outer\.compress, expected one of none, bfloat16"),
    ],
)
def test_invalid_outer_settings_are_rejected(given, words):
    with pytest.raises(ConfigError, match=words):
        Outer(**given).checked()


def test_valid_outer_settings_are_normalised():
    found = Outer(bucket_bytes="1MB", compress="BF16", weights=[3, 1]).checked()
    assert found == Outer(bucket_bytes=1e6, compress="bfloat16", weights=[3, 1])
    assert Outer(every=4, parts=4, behind=3, momentum=0.9, nesterov=True).checked().uses_local_sgd
    assert Outer(shard="flat", order="rank").checked().shard == "flat"
    assert replace(found, compress="none").num_residuals == 0 and found.num_residuals == 1


def test_overriding_field_inherits_range_and_meaning():
    lr = {each.name: each for each in settings_of(OPTIMIZERS["lars"])}["lr"]
    assert lr.default == 2.0 and lr.range.least == 0 and lr.meaning.startswith("Peak")


@pytest.mark.parametrize(
    ("outer", "message"),
    [
        (Outer(), ""),
        (Outer(compress="qsgd"), "outer.compress=qsgd: not exact"),
        (Outer(every=4), "every 4 steps their parameters are averaged, and an outer SGD"),
        (Outer(every=4, parts=2), "are averaged, in 2 parts in turn, and"),
        (Outer(every=4, behind=1), "are averaged, arriving 1 steps later, and"),
        (Outer(every=4, compress="qsgd"), "mean change, sent as qsgd. outer=allreduce is exact"),
    ],
)
def test_inexact_data_parallelism_is_explained(outer, message):
    assert message in outer.inexact()
    assert bool(outer.inexact()) is bool(message)
