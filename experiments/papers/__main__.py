"""Make the papers' tables.

python -m experiments.papers                   # all papers: two minutes of one core
python -m experiments.papers gpipe chimera     # some
python -m experiments.papers --write           # writes README.md and figures.json
"""

import argparse
import sys
from pathlib import Path
from typing import Final

from experiments.papers import chimera, dualpipe, gems, gpipe, hypar_flow, zero_bubble
from experiments.papers.report import as_json, markdown, run, summary

HERE: Final = Path(__file__).parent
PAPERS: Final = tuple(
    module.PAPER for module in (gpipe, gems, hypar_flow, chimera, zero_bubble, dualpipe)
)
INTRODUCTION: Final = """# The papers' tables, simulated

**Purpose.** Reproduce the tables of papers by the simulator, the schedules and the models of this
project. Exact figures (parameter counts, bubble formulas, numbers of activations) must be equal.
Simulated ones are shown next to the paper's, with the error; the aim is 10 % if a paper gives
enough information. Each table names what the paper gives and what is assumed. A rate that is not
given is derived from one figure of the table, and that figure is not compared.

**Method.** Only the simulator runs, on one core and without a device; the figures are the same on
every machine. A fast test checks the exact formulas. The papers' figures were read in public
transcripts of them, and in the repositories of torchgpipe and DualPipe.

    python -m experiments.papers            # prints all this
    python -m experiments.papers --write    # writes this page and figures.json again

**Results.**
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    names = [paper.name for paper in PAPERS]
    parser.add_argument("papers", nargs="*", metavar="PAPER", help=f"some of {', '.join(names)}")
    parser.add_argument("--write", action="store_true", help="write README.md and figures.json")
    words = parser.parse_args()
    for name in words.papers:
        if name not in names:
            parser.error(f"papers: expected some of {', '.join(names)}, got {name}")
    if words.write and words.papers:
        parser.error("--write: expected no names beside it, as the page has all papers; leave out")
    outcomes = [run(paper) for paper in PAPERS if not words.papers or paper.name in words.papers]
    page = "\n\n".join([summary(outcomes), *map(markdown, outcomes)])
    print(page)
    if words.write:
        (HERE / "README.md").write_text(f"{INTRODUCTION}\n{page}\n", encoding="utf-8")
        (HERE / "figures.json").write_text(as_json(outcomes), encoding="utf-8")
    return 0 if all(equal == of for equal, of in (each.equals for each in outcomes)) else 1


if __name__ == "__main__":
    sys.exit(main())
