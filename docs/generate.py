"""Write the pages of the reference that follow from the code: `python -m docs.generate`.

A test fails where a page is not what this gives.
"""

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpipe_hpc.config.explained import Explained, about, sections_of, settings_of
from gpipe_hpc.schedule import compare, comparison_table

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
REFERENCE = ROOT / "docs" / "reference"
_GROUPS = {
    "model": "What is trained. `model=NAME` chooses one, `model.KEY=VALUE` changes it.",
    "data": "What a run reads. `data=NAME` chooses one, `data.KEY=VALUE` changes it.",
    "optimizer": "How weights are updated. `optimizer=NAME` chooses one.",
    "outer": "How gradients are combined over replicas. `outer=NAME` chooses one.",
}
_HEAD = """# Settings

This page is generated from `conf/`. Any setting can be given on the command line as
`NAME=VALUE`; an unknown name is refused. A list is written `NAME=[1,2]`, nothing is written
`NAME=null`, and a number may be written `16e9`.

{contents}
"""


_SCHEDULES = """# Schedules

This page is generated. `pipeline.schedule=NAME` chooses a schedule, `pipeline.options.KEY=VALUE`
sets its options.

{table}

For four ranks, eight micro-batches, F = I = W = 1 for a rank's share of the model (`I` and `W` are
the halves of a backward: for the input, and for the weights) and free transfers. Bubble: idle over
total time. Activations: the most that a rank keeps, in micro-batches of a quarter of the model.
Weights: quarters of the model that a rank holds. For your own numbers:

```sh
python -m gpipe_hpc.draw draw.format=table pipeline.stages=4 pipeline.microbatches=8
```

- `auto` searches an order for the measured costs of your layers, and `file` runs a table of your
  own: see [draw and compare schedules](../how-to/pictures.md).
- `gems` (Jain et al.) is for images so large that a rank holds one: see [large
  images](../../experiments/large_images/README.md). Without `replications` each pass has one
  micro-batch; `replications=1` is MAST, more are MASTER.
- The paper of every schedule, with its figures next to ours: [the
  literature](../../experiments/literature.md).
"""


def main() -> None:
    """Write all generated pages."""
    for name, page in pages().items():
        (REFERENCE / name).write_text(page, "utf-8")
        print(f"wrote docs/reference/{name}")


def pages() -> dict[str, str]:
    """Return the text of each page by its name."""
    table = comparison_table(compare(4, 8))
    return {"settings.md": settings(), "schedules.md": _SCHEDULES.format(table=table)}


def settings() -> str:
    """Return the page of all settings."""
    sections = sections_of(CONF / "config.yaml")
    groups = [name for name in _GROUPS if (CONF / name).is_dir()]
    contents = (
        f"Sections of `config.yaml`: {_linked(each.name for each in sections)}. "
        f"Groups of presets: {_linked(groups)}."
    )
    lines = [_HEAD.format(contents="\n".join(textwrap.wrap(contents, 100)))]
    for name, meaning, rows in sections:
        lines += [
            f"## {name}",
            "",
            *([f"{_sentence(meaning)}\n"] if meaning else []),
            *_table(rows),
        ]
    for group in groups:
        lines += [f"## {group}", "", _GROUPS[group], ""]
        for path in sorted((CONF / group).glob("*.yaml")):
            lines += [f"### {group}={path.stem}", "", about(path), ""]
            own = [each for each in settings_of(path) if not each.name.startswith("_")]
            lines += _table([each._replace(name=f"{group}.{each.name}") for each in own])
    return "\n".join(lines).rstrip() + "\n"


def _linked(names: Iterable[str]) -> str:
    return ", ".join(f"[{name}](#{name})" for name in names)


def _table(rows: Sequence[Explained]) -> list[str]:
    if not rows:
        return []
    lines = ["| setting | default | meaning |", "| --- | --- | --- |"]
    for key, value, meaning in rows:
        if not value:
            continue
        shown = f"`{value}`".replace("|", "\\|")
        lines.append(f"| `{key}` | {shown} | {meaning.replace('|', chr(92) + '|')} |")
    return [*lines, ""]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


if __name__ == "__main__":
    main()
