"""Help on the screen: what a command does, its settings with their meanings, an example."""

import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from gpipe_hpc.config.explained import Explained, about, sections_of, settings_of


class Command(NamedTuple):
    """What a command does, one that works as it stands, and the sections that only others use."""

    about: str
    example: str
    without: tuple[str, ...] = ()


_OTHERS: Final = ("draw", "plan", "preflight", "verify", "bench", "export", "report")


def _but(*own: str) -> tuple[str, ...]:
    return tuple(name for name in _OTHERS if name not in own)


COMMANDS: Final[Mapping[str, Command]] = MappingProxyType(
    {
        "train": Command(
            "Train a model, in one process or under torchrun, srun or mpirun.",
            "torchrun --standalone --nproc_per_node 2 -m gpipe_hpc.train train.steps=20",
            _but("preflight"),
        ),
        "plan": Command(
            "Say what a run would need and take, before it starts.",
            "python -m gpipe_hpc.plan model=gpt2 data=synthetic data.vocab_size=50257 "
            "pipeline.stages=4 pipeline.memory_bytes=24GB",
            (*_but("plan"), "lr", "run", "checkpoint", "comm", "metrics", "trace"),
        ),
        "preflight": Command(
            "Look whether hosts, ranks and links are fit for a run, and measure the links.",
            "torchrun --standalone --nproc_per_node 2 -m gpipe_hpc.preflight",
            (*_but("preflight"), "lr", "loss", "metrics", "trace"),
        ),
        "draw": Command(
            "Draw schedules, simulated or as a run measured them.",
            "python -m gpipe_hpc.draw pipeline.schedule=1f1b pipeline.stages=4",
            (*_but("draw"), "lr", "loss", "checkpoint", "comm", "metrics", "trace"),
        ),
        "verify": Command(
            "Train some steps in a layout and in one plain process, and compare them.",
            "python -m gpipe_hpc.verify pipeline.stages=2 pipeline.replicas=2",
            (*_but("verify"), "metrics"),
        ),
        "bench": Command(
            "Measure the speed of a model and settings over a sweep.",
            "python -m gpipe_hpc.bench bench.ranks=[1,2] bench.microbatches=[4,8]",
            (*_but("bench"), "metrics"),
        ),
        "export": Command(
            "Write the weights of a run as safetensors.",
            "python -m gpipe_hpc.export run.dir=RUN",
            (*_but("export"), "lr", "loss", "pipeline", "train", "comm", "metrics", "trace"),
        ),
        "report": Command(
            "Show what a run did, where its time went, and what would make it faster, as one page.",
            "python -m gpipe_hpc.report run.dir=RUN",
            (
                *_but("report"),
                *("lr", "loss", "pipeline", "train", "comm", "metrics", "trace", "checkpoint"),
            ),
        ),
    }
)
_GROUPS: Final = ("model", "data", "optimizer", "outer")
_WIDTH: Final = 100
_COLUMN: Final = 36  # where meanings begin


def list_of_commands() -> str:
    """Return what ``python -m gpipe_hpc`` says."""
    width = max(map(len, COMMANDS))
    lines = [f"  python -m gpipe_hpc.{name:<{width}}  {c.about}" for name, c in COMMANDS.items()]
    return "\n".join(
        [
            "gpipe_hpc trains models that are too big for one device.",
            "",
            *lines,
            "",
            "All take settings as NAME=VALUE; --help behind any of them shows its settings.",
        ]
    )


def help_of(name: str, conf: Path, words: Sequence[str]) -> str:
    """Return the help of a command: what it is about first, then what is used most.

    `words` may choose the presets whose settings are shown, and name the sections to show alone.
    """
    command = COMMANDS[name]
    sections = {each.name: each for each in sections_of(conf / "config.yaml")}
    shown = [each for each in _order(name, sections) if each not in command.without]
    wanted = [each for each in shown if each in words]
    lines = [
        f"python -m gpipe_hpc.{name} NAME=VALUE ...",
        "",
        command.about,
        "",
        f"example: {command.example}",
        "",
        "A list is written NAME=[1,2], nothing is written NAME=null. With -m each combination of",
        "values (NAME=1,2) runs as a separate job. --help SECTION shows one section alone:",
        *textwrap.wrap(", ".join(shown), _WIDTH),
    ]
    for each in wanted or shown:
        if each in _GROUPS:
            lines += _group(each, conf, words)
        else:
            lines += ["", f"{each}: {sections[each].meaning}".rstrip(": ")]
            lines += _rows(sections[each].settings)
    return "\n".join(lines)


_MUCH_USED: Final = ("train", "pipeline", "model", "data", "optimizer", "run", "checkpoint")


def _order(name: str, sections: Collection[str]) -> list[str]:
    """Return sections and groups of presets: a command's own, those that are used most, others."""
    own = [name] if name in sections else []
    return list(dict.fromkeys([*own, *_MUCH_USED, *_GROUPS, *sections]))


def _group(group: str, conf: Path, words: Sequence[str]) -> Iterator[str]:
    paths = {path.stem: path for path in sorted((conf / group).glob("*.yaml"))}
    chosen = next(
        (word.partition("=")[2] for word in words if word.startswith(f"{group}=")),
        _default(group, conf),
    )
    yield ""
    yield from textwrap.wrap(
        f"{group}=NAME, one of {', '.join(paths)}", _WIDTH, subsequent_indent="    "
    )
    if chosen in paths:
        yield from textwrap.wrap(f"  of {group}={chosen}: {about(paths[chosen])}", _WIDTH)
        own = [e for e in settings_of(paths[chosen]) if not e.name.startswith("_")]
        yield from _rows(each._replace(name=f"{group}.{each.name}") for each in own)


def _default(group: str, conf: Path) -> str:
    """Return the preset that ``config.yaml`` takes by itself."""
    for line in (conf / "config.yaml").read_text("utf-8").splitlines():
        name, _, value = line.strip().removeprefix("- ").partition(":")
        if name == group and value:
            return value.partition("#")[0].strip()
    return ""


def _rows(settings: Iterable[Explained]) -> Iterator[str]:
    """Yield each setting with its default, and its meaning beside it where there is room."""
    for each in settings:
        if not each.default:
            continue
        head = f"  {each.name}={each.default}"
        meaning = textwrap.wrap(each.meaning, _WIDTH - _COLUMN, break_on_hyphens=False)
        if len(head) + 2 > _COLUMN or not meaning:
            yield head
        else:
            yield f"{head:<{_COLUMN}}{meaning.pop(0)}"
        yield from (" " * _COLUMN + line for line in meaning)
