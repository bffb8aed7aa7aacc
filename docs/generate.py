"""Write the pages of the reference that follow from the code: `python -m docs.generate`.

A test fails where a page is not what this gives.
"""

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from gpipe_hpc.config.compose import data_kind, presets
from gpipe_hpc.config.errors import GROUPS
from gpipe_hpc.config.help import (
    SettingRow,
    about_preset,
    row_of,
    rows_of_builder,
    setting_rows_of,
    shown,
)
from gpipe_hpc.config.keywords import Keywords, setting_of
from gpipe_hpc.schedule import compare, comparison_table
from gpipe_hpc.settings import (
    OPTIMIZERS,
    Config,
    DataConfig,
    Level,
    OptimizerConfig,
    Outer,
    settings_of,
)

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
_HEAD = """# Settings

This page is generated from the fields of `gpipe_hpc/settings`. Any setting can be given on the
command line as `NAME=VALUE`; an unknown name is refused. A list is written `NAME=[1,2]`, nothing
`NAME=null`, and a number may be written `16e9`. `--help SECTION` shows a section on the screen.

- [Everyday settings](#everyday-settings): what most runs set.
- [Settings of clusters](#settings-of-clusters): several hosts, slow links, jobs that are requeued.
- [Expert settings](#expert-settings): the defaults are right for nearly all runs.
- [Presets](#presets): [models](#models), [data](#data), [optimizers](#optimizers),
  [replicas](#replicas).
"""
_LEVELS = {
    Level.EVERYDAY: "Everyday settings",
    Level.CLUSTER: "Settings of clusters",
    Level.EXPERT: "Expert settings",
}
_HIDDEN = ("target", "keywords")  # of data=own: set by other names


_SCHEDULES = """# Schedules

This page is generated. `pipeline.schedule=NAME` chooses a schedule, `pipeline.options.KEY=VALUE`
sets its options.

{table}

For four ranks, eight micro-batches, [F = I = W = 1](../explanation/tables.md#words) for a rank's
share of the model, and free transfers. Bubble: idle over total time. Activations: the most that a
rank keeps, in micro-batches of a quarter of the model. Weights: quarters of the model that a rank
holds. For your own numbers:

```sh
python -m gpipe_hpc.draw draw.format=table pipeline.stages=4 pipeline.microbatches=8
```

- `auto` searches an order for the measured costs of your layers, and `file` runs a table of your
  own: see [draw and compare schedules](../how-to/pictures.md#choose-or-write-a-schedule).
- [The literature](../../experiments/literature.md) has the paper of every schedule.
"""


def main() -> None:
    """Write all generated pages."""
    for name, page in pages().items():
        (REFERENCE / name).write_text(page, "utf-8")
        print(f"wrote docs/reference/{name}")


def pages() -> dict[str, str]:
    """Return the text of each page by its name."""
    table = comparison_table(compare(4, 8))
    return {
        "settings.md": settings(),
        "schedules.md": _SCHEDULES.format(table=table),
        "library.md": library((REFERENCE / "library.md").read_text("utf-8")),
    }


def library(page: str) -> str:
    """Return the page of the library with its table of keywords of `Pipeline` as the code has it.

    A keyword has the meaning of the setting with its name, of which the first part is shown, or
    that of the docstring below it.
    """
    cells = []
    for each in settings_of(Keywords):
        setting = setting_of(each.name)
        default = "Outer()" if isinstance(each.default, Outer) else repr(each.default)
        meaning = each.meaning or (
            re.split(r"[.;] (?![^(]*\))", setting.meaning)[0] if setting else ""
        )
        meaning = re.sub(r"\b(pipeline|outer)\.(?=\w)", "", meaning.replace("null", "None"))
        cells.append([_code(each.name), _code(default), meaning.removesuffix(".") + "."])
    head, _, rest = page.partition("| keyword |")
    table = "\n".join(_grid(["keyword", "default", "meaning"], cells))
    return head + table + "\n" + rest.partition("\n\n")[2]


def settings() -> str:
    """Return the page of all settings."""
    lines = [_HEAD]
    for level, title in _LEVELS.items():
        lines += [f"## {title}", ""]
        for each in fields(Config):
            rows = [] if each.name in GROUPS else setting_rows_of(each.name)
            own = [row for row in rows if row.level is level]
            if own:
                lines += [f"### {each.name}: {level.value}", "", *_table(own)]
    lines += ["## Presets", "", *_models(), *_data(), *_others()]
    return "\n".join(map(_wrapped, lines)).rstrip() + "\n"


def _wrapped(line: str) -> str:
    """Return a line of prose in lines of at most 100 columns."""
    if len(line) <= 100 or "\n" in line or line.startswith(("|", "#")):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 100, subsequent_indent=indent, break_on_hyphens=False)


def _models() -> Iterator[str]:
    """Yield a table of keywords for each function that builds models, and its presets."""
    yield from ("### Models", "", "`model=NAME` chooses one, `model.KEY=VALUE` changes it.", "")
    builders: dict[str, list[str]] = {}
    for name, values in presets("model").items():
        builders.setdefault(str(values.get("_target_")).rpartition(".")[2], []).append(name)
    for names in builders.values():
        rows = {row.name: row for name in names for row in rows_of_builder("model", name)}
        keys = [key for key in rows if not key.endswith("_")]
        if not keys:
            yield from (f"`model={names[0]}`: {about_preset('model', names[0])}", "")
            continue
        short = [name.removeprefix("model.") for name in keys]
        yield from _grid(
            ["preset", *map(_code, short), "what it is"],
            (
                [
                    _code(name),
                    *(_code(_value(name, key)) for key in keys),
                    about_preset("model", name),
                ]
                for name in names
            ),
        )
        yield from (f"- `{rows[key].name}`: {rows[key].meaning}" for key in keys)
        yield ""


def _value(preset: str, key: str) -> str:
    found = {row.name: row.default for row in rows_of_builder("model", preset)}
    return found.get(key, "")


def _data() -> Iterator[str]:
    """Yield a table for each kind of data, and for what kinds share."""
    yield from ("### Data", "", "`data=NAME` chooses one, `data.KEY=VALUE` changes it.", "")
    done: set[type] = set()
    for name, values in presets("data").items():
        kind = data_kind(values.get("_target_") or "own")
        bases = [each for each in reversed(kind.__mro__) if issubclass(each, DataConfig)]
        for base in bases:
            if base in done or base is kind:
                continue
            done.add(base)
            own = _own_rows(base)
            if own:
                yield from (f"#### {_title(base)}", "", *_table(own))
        own_values = ", ".join(
            f"`data.{key}={shown(value)}`" for key, value in values.items() if key != "_target_"
        )
        yield from (f"#### data={name}", "", about_preset("data", name), "")
        others = ", ".join(_link(each) for each in bases if each is not kind and _own_rows(each))
        more = f"Besides these: {others}." + (f" Sets {own_values}." if own_values else "")
        yield from (more, "")
        yield from _table(_own_rows(kind))


def _own_rows(kind: type[DataConfig]) -> list[SettingRow]:
    """Return the settings that a kind of data defines, or gives another default."""
    names = {f"data.{name}" for name in kind.__annotations__ if name not in _HIDDEN}
    return [row_of(each) for each in settings_of(kind, "data.") if each.name in names]


def _title(kind: type) -> str:
    words = re.findall("[A-Z][a-z]+[0-9]*", kind.__name__.removesuffix("Config"))
    return f"{' '.join(words).capitalize()} settings"


def _link(kind: type) -> str:
    title = _title(kind)
    return f"[{title.lower()}](#{title.lower().replace(' ', '-')})"


def _others() -> Iterator[str]:
    yield from ("### Optimizers", "", "`optimizer=NAME` chooses one.", "")
    for name, kind in OPTIMIZERS.items():
        own = [
            row
            for row in setting_rows_of("optimizer", name)
            if row.name[10:] in kind.__annotations__
        ]
        if name == "adamw":
            common = set(OptimizerConfig.__annotations__)
            own += [row for row in setting_rows_of("optimizer", name) if row.name[10:] in common]
            own = list(dict.fromkeys(own))
        yield from (f"#### optimizer={name}", "", about_preset("optimizer", name), "")
        yield from _table(own)
    yield from ("### Replicas", "", "`outer=NAME` chooses one:", "")
    for name, values in presets("outer").items():
        given = ", ".join(f"`outer.{key}={shown(value)}`" for key, value in values.items())
        yield f"- `outer={name}`: {about_preset('outer', name)}" + (f" Sets {given}." * bool(given))
    yield ""
    yield from _table(setting_rows_of("outer", "allreduce"))


def _table(rows: Iterable[SettingRow]) -> list[str]:
    cells = [[_code(row.name), _code(row.default), row.meaning] for row in rows]
    return list(_grid(["setting", "default", "meaning"], cells)) if cells else []


def _grid(head: Sequence[str], cells: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join('---' for _ in head)} |"
    for line in cells:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |"
    yield ""


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    main()
