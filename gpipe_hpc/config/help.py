"""Generate the help of commands and the rows of docs/reference/settings.md from the settings."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from omegaconf import OmegaConf

from gpipe_hpc.config.compose import conf_dir, data_kind, presets
from gpipe_hpc.config.errors import GROUPS
from gpipe_hpc.settings import OPTIMIZERS, Config, Level, Outer, Setting, settings_of


class Command(NamedTuple):
    """A command in the help.

    Args:
        about: Description.
        example: A command line that works as it is.
        sections: Sections of settings that the command uses.
    """

    about: str
    example: str
    sections: str


_TRAINING: Final = "train pipeline model data optimizer outer lr loss checkpoint run comm"
COMMANDS: Final[Mapping[str, Command]] = MappingProxyType(
    {
        "train": Command(
            "Train a model, in one process or under torchrun, srun or mpirun.",
            "torchrun --standalone --nproc_per_node 2 -m gpipe_hpc.train train.steps=20",
            f"{_TRAINING} metrics trace preflight",
        ),
        "plan": Command(
            "Report what a run would need and take, before it starts.",
            "python -m gpipe_hpc.plan model=gpt2 data=synthetic data.vocab_size=50257 "
            "pipeline.stages=4 pipeline.memory_bytes=24GB",
            "plan pipeline train model data optimizer outer loss",
        ),
        "preflight": Command(
            "Check that hosts, ranks and links are fit for a run, and measure the links.",
            "torchrun --standalone --nproc_per_node 2 -m gpipe_hpc.preflight",
            "preflight train pipeline model data optimizer outer run checkpoint comm",
        ),
        "draw": Command(
            "Draw schedules, simulated or measured in a run.",
            "python -m gpipe_hpc.draw pipeline.schedule=1f1b pipeline.stages=4",
            "draw pipeline train run outer",
        ),
        "verify": Command(
            "Train some steps in a layout and in one plain process, and compare them.",
            "python -m gpipe_hpc.verify pipeline.stages=2 pipeline.replicas=2",
            f"verify {_TRAINING} trace",
        ),
        "bench": Command(
            "Measure the speed of a model and settings over a sweep.",
            "python -m gpipe_hpc.bench bench.ranks=[1,2] bench.microbatches=[4,8]",
            f"bench {_TRAINING} trace",
        ),
        "export": Command(
            "Write the weights of a run as safetensors.",
            "python -m gpipe_hpc.export run.dir=RUN",
            "export run checkpoint",
        ),
        "report": Command(
            "Show what a run did, where its time went, and what would make it faster, as one page.",
            "python -m gpipe_hpc.report run.dir=RUN",
            "report run",
        ),
    }
)
_WIDTH: Final = 100
_COLUMN: Final = 36  # where meanings begin
_LARGE: Final = 1e15  # upper limits from here on are not shown
_ALL: Final = "all"
_COMMENTED: Final = re.compile(r"(?P<key>\w+):(?: [^#]*)?# (?P<meaning>.*)")


class SettingRow(NamedTuple):
    """Name, default, meaning and level of a setting in the help."""

    name: str
    default: str
    meaning: str
    level: Level


def list_of_commands() -> str:
    """Return the text that ``python -m gpipe_hpc`` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  python -m gpipe_hpc.{name:<{width}}  {c.about}" for name, c in COMMANDS.items()]
    return "\n".join(
        [
            "gpipe_hpc trains models that are too big for one device.",
            "",
            *lines,
            "",
            "All take settings as NAME=VALUE; --help after any of them shows its settings.",
        ]
    )


def help_of(name: str, words: Sequence[str]) -> str:
    """Return the help of a command: its description and the settings that most users need.

    Args:
        name: Name of the command.
        words: Arguments of the command line. They may choose presets, name sections to show in
            full, or contain ``all``.
    """
    command = COMMANDS[name]
    shown = command.sections.split()
    wanted = [each for each in shown if each in words]
    levels = set(Level) if wanted or _ALL in words else {Level.EVERYDAY, Level.CLUSTER}
    lines = [
        f"python -m gpipe_hpc.{name} NAME=VALUE ...",
        "",
        command.about,
        "",
        f"example: {command.example}",
        "",
        "Write a list as NAME=[1,2] and no value as NAME=null. With -m each combination of values",
        "(NAME=1,2) runs as a separate job. --help SECTION shows all settings of a section,",
        "--help all shows those of all sections:",
        *textwrap.wrap(", ".join(shown), _WIDTH),
    ]
    for section in wanted or shown:
        chosen = _chosen(section, words)
        head = [f"{section}: {_about_section(section)}".rstrip(": ")]
        if section in GROUPS:
            head = [f"{section}=NAME, one of {', '.join(presets(section))}"]
            head += [f"{section}={chosen}: {about_preset(section, chosen)}"]
        lines += ["", *(line for each in head for line in _wrapped(each))]
        lines += _lines(row for row in setting_rows_of(section, chosen) if row.level in levels)
    return "\n".join(lines)


def setting_rows_of(section: str, preset: str = "") -> list[SettingRow]:
    """Return the settings of a section, or of one of its presets."""
    if section not in GROUPS:
        own = [each for each in settings_of(Config) if each.name.partition(".")[0] == section]
        return list(map(row_of, own))
    values = presets(section).get(preset, {})
    if section == "model" or values.get("_target_", "") is None:
        return rows_of_builder(section, preset)
    schema: Any = Outer
    if section == "optimizer":
        schema = OPTIMIZERS.get(preset, OPTIMIZERS["adamw"])
    elif section == "data":
        schema = data_kind(values.get("_target_"))
    return [
        row_of(setting, values.get(setting.name.partition(".")[2], setting.default))
        for setting in settings_of(schema, f"{section}.")
    ]


def row_of(setting: Setting, *value: Any) -> SettingRow:
    """Return the row of a setting with its default, or with another value."""
    meaning = setting.meaning
    limits = setting.range
    if limits is not None and (limits.least not in (0, 1) or limits.most < _LARGE):
        meaning += f" {str(limits).capitalize()}."
    elif setting.choices is not None and not all(c in meaning for c in setting.choices.names):
        meaning += f" One of {setting.choices}."
    return SettingRow(
        setting.name, shown(*value or (setting.default,)), meaning.strip(), setting.level
    )


def rows_of_builder(group: str, preset: str) -> list[SettingRow]:
    """Return the keywords in a preset of a function; comments in the file are their meanings."""
    path = conf_dir() / group / f"{preset}.yaml"
    if not path.is_file():
        return []
    lines = path.read_text("utf-8").splitlines()
    comments = {m["key"]: m["meaning"] for m in map(_COMMENTED.fullmatch, lines) if m}
    return [
        SettingRow(f"{group}.{key}", shown(value), comments.get(key, ""), Level.EVERYDAY)
        for key, value in presets(group)[preset].items()
    ]


def about_preset(group: str, preset: str) -> str:
    """Return the comment at the top of a preset."""
    path = conf_dir() / group / f"{preset}.yaml"
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    first = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return " ".join(line.lstrip("# ") for line in lines[:first])


def shown(value: Any) -> str:
    """Return a value in the syntax of the command line."""
    if isinstance(value, dict | list):
        return str(value).replace("'", "").replace(", ", ",")
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _chosen(section: str, words: Sequence[str]) -> str:
    """Return the preset of a section that the words choose, or else conf/config.yaml."""
    if section not in GROUPS:
        return ""
    given = [word.partition("=")[2] for word in words if word.startswith(f"{section}=")]
    if given:
        return given[-1]
    main: Any = OmegaConf.to_container(OmegaConf.load(conf_dir() / "config.yaml"))
    return next((each[section] for each in main["defaults"] if section in each), "")


def _about_section(section: str) -> str:
    kinds = {each.name: type(getattr(Config(), each.name)) for each in fields(Config)}
    text = (kinds[section].__doc__ or "") if kinds[section] is not dict else ""
    return " ".join(text.split("\n\n")[0].split())


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="    ", break_on_hyphens=False)


def _lines(rows: Iterable[SettingRow]) -> Iterator[str]:
    """Yield the lines of each setting: its default, and its meaning in a second column."""
    for row in rows:
        head = f"  {row.name}={row.default}"
        meaning = textwrap.wrap(row.meaning, _WIDTH - _COLUMN, break_on_hyphens=False)
        if len(head) + 2 > _COLUMN or not meaning:
            yield head
        else:
            yield f"{head:<{_COLUMN}}{meaning.pop(0)}"
        yield from (" " * _COLUMN + line for line in meaning)
