"""Pictures by matplotlib for light and dark pages, with a description in words."""

import io
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

INK: Final = "#1b1b1b"
"""Of text and axes; a dark page has another."""
COLOURS: Final = (
    *("#2f7ec2", "#cf5f1f", "#2a8f57", "#8f62cf", "#c2417c", "#8c7415", "#0f8a94", "#c74545"),
    *("#6d7690", "#5f8a1e"),
)
"""Of lines: each stands out by 3 to 1 or more from both grounds."""
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
LIGHT, DARK, DARK_INK = "#ffffff", "#16181d", "#e6e6e6"


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def settings() -> Any:
    """Return the context in which a figure has to be filled and saved."""
    from matplotlib import rc_context

    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    parameters: Any = {
        "svg.hashsalt": "gpipe_hpc",
        "svg.fonttype": "none",  # letters as letters: a third of the size
        "font.size": 9,
        "font.family": "sans-serif",
        "axes.facecolor": "none",
        "legend.framealpha": 0.0,
        **dict.fromkeys(names, INK),
    }
    return rc_context(parameters)


def save(figure: Any, path: Path, title: str, description: str) -> None:
    """Write a figure as SVG; `description` says in words what it shows."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(with_grounds(text.getvalue(), title, description), encoding="utf-8")


def with_grounds(svg: str, title: str, description: str) -> str:
    """Let the page choose the colours of ground and ink; say in words what is seen."""
    begin, end = svg.index("<svg"), svg.index(">", svg.index("<svg"))
    style = (
        f"svg{{color:{INK}}}#patch_1 path{{fill:{LIGHT}!important}}"
        f"@media (prefers-color-scheme:dark){{svg{{color:{DARK_INK}}}"
        f"#patch_1 path{{fill:{DARK}!important}}}}"
    )
    head = (
        f'{svg[begin:end]} role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">\n'
        f" <title>{escape(title)}</title>\n <desc>{escape(description)}</desc>\n"
        f" <style>{style}</style>\n"
    )
    return head + svg[end + 1 :].replace(INK, "currentColor")
