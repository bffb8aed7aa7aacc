"""Run the exercises of the course.

python -m experiments.course             # lists them
python -m experiments.course 5           # one, with its text
python -m experiments.course all         # all, one line for each
python -m experiments.course notebooks   # writes them as notebooks into experiments/course/out
"""

import contextlib
import io
import re
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from experiments.course.page import OUT, ROOT

HERE: Final = Path(__file__).resolve().parent
TROUBLE: Final = "## If the number does not come out"


class Cell(NamedTuple):
    """A cell of a page: text in Markdown, or Python code; `line` counts from 0."""

    is_text: bool
    source: str
    line: int


def pages() -> dict[int, Path]:
    """Return the pages by number."""
    return {int(path.stem[2:4]): path for path in sorted(HERE.glob("ex[0-9][0-9]_*.py"))}


def cells(path: Path) -> Iterator[Cell]:
    """Split a script in the percent format into its cells."""
    lines = path.read_text("utf-8").splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("# %%")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        is_text = "[markdown]" in lines[start]
        body = lines[start + 1 : end]
        if is_text:
            body = [re.sub(r"^# ?", "", line) for line in body]
        yield Cell(is_text, "\n".join(body).strip("\n"), start + 1)


def title(path: Path) -> str:
    """Return the heading of a page."""
    return next(cells(path)).source.splitlines()[0].removeprefix("# ")


def execute(path: Path) -> None:
    """Print the text of a page and run its code cell by cell, like a notebook."""
    names: dict[str, object] = {"__name__": "__main__", "__file__": str(path)}
    for cell in cells(path):
        if cell.is_text:
            print(f"\n{cell.source}\n", flush=True)
        else:
            blank = "\n" * cell.line  # tracebacks show the line numbers of the file
            exec(compile(blank + cell.source, str(path), "exec"), names)


def trouble(path: Path) -> str:
    """Return the page's section on numbers that do not come out."""
    text = "\n".join(cell.source for cell in cells(path) if cell.is_text)
    return TROUBLE + text.partition(TROUBLE)[2]


def execute_all() -> int:
    """Run every page; print one line for each, and the output of pages that fail."""
    failed = 0
    sys.stdin = io.StringIO()  # no predictions are asked for
    for path in pages().values():
        began = time.monotonic()
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                execute(path)
            answers = re.findall(r"^ANSWER: (.*)", output.getvalue(), re.M)
            outcome = "; ".join(answers)
        except Exception:
            failed += 1
            outcome = f"FAILED\n{output.getvalue()}\n{traceback.format_exc()}\n{trouble(path)}"
        print(f"{time.monotonic() - began:6.1f} s  {title(path)}: {outcome}", flush=True)
    print(f"{len(pages()) - failed} of {len(pages())} exercises gave their numbers")
    return 1 if failed else 0


def write_notebooks() -> None:
    """Write each page as a notebook."""
    import nbformat
    from nbformat import v4

    OUT.mkdir(exist_ok=True)
    for path in pages().values():
        made = []
        for cell in cells(path):
            name = f"{path.stem[:4]}-{cell.line}"
            if cell.is_text:
                made.append(v4.new_markdown_cell(cell.source, id=name))
            else:
                made.append(v4.new_code_cell(cell.source, id=name))
        kernel = {"name": "gpipe-hpc", "display_name": "gpipe-hpc"}
        notebook = v4.new_notebook(metadata={"kernelspec": kernel}, cells=made)
        nbformat.validate(notebook)
        target = OUT / f"{path.stem[2:]}.ipynb"
        nbformat.write(notebook, target)
        print(f"wrote {target.relative_to(ROOT)}")


def main(arguments: list[str]) -> int:
    """Run the command line."""
    if not arguments:
        print(__doc__)
        print("\n".join(title(path) for path in pages().values()))
    elif arguments == ["all"]:
        return execute_all()
    elif arguments == ["notebooks"]:
        write_notebooks()
    else:
        for argument in arguments:
            if not argument.isdigit() or int(argument) not in pages():
                known = f"numbers from 1 to {max(pages())}, all or notebooks"
                print(f"no exercise {argument}: give {known}", file=sys.stderr)
                return 2
            path = pages()[int(argument)]
            try:
                execute(path)
            except Exception:
                print(f"{traceback.format_exc()}\n{trouble(path)}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
