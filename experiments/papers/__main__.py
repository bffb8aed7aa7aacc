"""Compute the tables of papers and compare them with the printed figures.

python -m experiments.papers                   # all papers: two minutes of one core
python -m experiments.papers gpipe chimera     # some
python -m experiments.papers --write           # writes README.md
"""

import argparse
import sys
from pathlib import Path
from typing import Final

from experiments.papers import chimera, dualpipe, gems, gpipe, hypar_flow, zero_bubble
from experiments.papers.report import markdown, run, summary

HERE: Final = Path(__file__).parent
PAPERS: Final = tuple(
    module.PAPER for module in (gpipe, gems, hypar_flow, chimera, zero_bubble, dualpipe)
)
INTRODUCTION: Final = """# The papers' tables, simulated

The tables of six papers, computed with the simulator, the schedules and the models of this project.
Exact figures (parameter counts, bubble formulas, numbers of activations) must be equal. Simulated
figures are aimed to be within 10 % if the paper gives enough information.

**Method.** Nothing is measured, so the figures are the same on every machine. Each table names what
the paper gives and what is assumed. If a rate is not given, it is derived from one figure of the
table, which is then not compared. The papers' figures were read in public transcripts, and in the
repositories of torchgpipe and DualPipe.

    python -m experiments.papers            # prints all figures: two minutes of one core
    python -m experiments.papers gems       # one paper: seconds
    python -m experiments.papers --write    # writes this page

**Results.**
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    names = [paper.name for paper in PAPERS]
    parser.add_argument("papers", nargs="*", metavar="PAPER", help=f"some of {', '.join(names)}")
    parser.add_argument("--write", action="store_true", help="write README.md")
    words = parser.parse_args()
    for name in words.papers:
        if name not in names:
            parser.error(f"papers: expected some of {', '.join(names)}, got {name}")
    if words.write and words.papers:
        parser.error("--write: expected no names, because the page has all papers; remove them")
    outcomes = [run(paper) for paper in PAPERS if not words.papers or paper.name in words.papers]
    print("\n\n".join([summary(outcomes), *(markdown(each, sys.maxsize) for each in outcomes)]))
    if words.write:
        page = "\n\n".join([summary(outcomes), *map(markdown, outcomes)])
        (HERE / "README.md").write_text(f"{INTRODUCTION}\n{page}\n", encoding="utf-8")
    return 0 if all(equal == of for equal, of in (each.equals for each in outcomes)) else 1


if __name__ == "__main__":
    sys.exit(main())
