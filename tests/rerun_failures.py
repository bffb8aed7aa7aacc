"""Run the tests that failed in the last run again, one after the other, and name them.

    python tests/rerun_failures.py [arguments of pytest]

Failed tests of one file count once, since they may share a process that failed to start. If no file
or more than `MOST` files have failures, nothing is run, and the exit code is 1.
"""

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FAILED = Path(".pytest_cache/v/cache/lastfailed")
MOST = 10


def main(arguments: list[str], folder: Path = REPOSITORY) -> int:
    """Run failed tests again; return 0 if all of them pass now."""
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
