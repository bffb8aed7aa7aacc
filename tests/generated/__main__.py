"""Run many generated command lines and report those that end incorrectly; see `cases`.

python -m tests.generated --number 1000              # in this process
python -m tests.generated --number 50 --shell        # each as a process of a shell
python -m tests.generated --number 50 --torchrun     # each on 2 to 4 processes
"""

import argparse
import collections
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.generated.cases import BY_TORCHRUN, IN_A_SHELL, ON_THREADS, drawn
from tests.generated.running import (
    NOBODY,
    train_first,
    tried,
    tried_by_torchrun,
    tried_command,
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.generated", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--number", type=int, default=1000, help="how many cases")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--shell", action="store_true", help="run each as a shell does")
    how.add_argument("--torchrun", action="store_true", help="run each on several processes")
    parser.add_argument("--say", action="store_true", help="print how every case ended")
    asked = parser.parse_args()
    some = IN_A_SHELL if asked.shell else BY_TORCHRUN if asked.torchrun else ON_THREADS
    screen = sys.stdout
    codes: collections.Counter[str] = collections.Counter()
    num_faulty = 0
    began_s, began_cpu_s = time.time(), time.process_time()
    with tempfile.TemporaryDirectory(prefix="generated_") as name:
        trained = train_first(Path(name) / "first")
        for number in range(asked.first, asked.first + asked.number):
            case = drawn(number, some)
            place = Path(name) / str(number)
            if asked.torchrun:
                ranks, wrong = tried_by_torchrun(case, place, trained, dict(os.environ))
                found = next((each for each in ranks if each.code is not None), NOBODY)
            elif asked.shell:
                found, wrong = tried_command(case, place, trained, dict(os.environ))
            else:
                found, wrong = tried(case, place, trained)
            codes[f"{case.command} {found.code}"] += 1
            num_faulty += bool(wrong)
            if wrong or asked.say:
                print(
                    f"## {number}: {case}\n   code {found.code} {found.stderr[-700:]!r}",
                    file=screen,
                )
            for each in wrong:
                print(f"   FAULT {each}", file=screen, flush=True)
    print(f"{asked.number} cases, {num_faulty} faulty; exit codes {dict(sorted(codes.items()))}")
    print(f"{time.time() - began_s:.0f} s, {time.process_time() - began_cpu_s:.0f} s of processor")
    sys.exit(num_faulty > 0)


if __name__ == "__main__":
    main()
