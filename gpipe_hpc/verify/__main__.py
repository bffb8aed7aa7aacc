"""Entry point of `python -m gpipe_hpc.verify`."""

import sys

from gpipe_hpc.config import CommandJob, ExitCode, print_error, run_jobs
from gpipe_hpc.errors import GpipeError
from gpipe_hpc.verify.run import verify

DIFFERENT_EXIT_CODE = 3


def main() -> None:
    """Compose the settings, compare the layout with plain training, and exit.

    Exit codes: 0 equal training, 1 failure, 2 invalid settings, 3 different training. A sweep (-m)
    exits with the first code that is not 0.
    """
    sys.exit(run_jobs(_task, "verify"))


def _task(job: CommandJob) -> int:
    try:
        report = verify(job.config)
    except GpipeError as error:
        return print_error(error)
    if report is None:
        return ExitCode.DONE
    print(report)
    return ExitCode.DONE if report.is_same else DIFFERENT_EXIT_CODE


if __name__ == "__main__":
    main()
