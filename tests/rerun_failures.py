"""Run the tests that have failed in the last run once more, by themselves, and name them.

    python tests/rerun_failures.py [arguments of pytest]

Those of one file count as one, for they may share a start that has failed. More than `MOST` are no
accident: then nothing is run, and the exit code is 1.
"""

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FAILED = Path(".pytest_cache/v/cache/lastfailed")
MOST = 10


def main(arguments: list[str], folder: Path = REPOSITORY) -> int:
    """Return 0 if each test that has failed passes now."""
    try:
        failed = sorted(json.loads((folder / FAILED).read_text("utf-8")))
    except FileNotFoundError:
        failed = []
    files = {name.partition("::")[0] for name in failed}
    if not 0 < len(files) <= MOST:
        print(
            f"not run once more: {len(failed)} tests of {len(files)} files have failed, expected "
            f"1 to {MOST} files"
        )
        return 1
    print("run once more, one after the other:", *failed, sep="\n  ", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--lf", "--lfnf=none"]
    code = subprocess.call([*command, *arguments], cwd=folder)
    if code == 0:
        print("failed beside other tests and passed alone:", *failed, sep="\n  ")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
