"""Entry point of `python -m gpipe_hpc.draw`."""

import sys

from gpipe_hpc.config import CommandJob, ExitCode, print_error, run_jobs
from gpipe_hpc.draw.pictures import columns_of_terminal, draw, write_picture
from gpipe_hpc.errors import GpipeError


def main() -> None:
    """Compose the settings from the command line, draw, and exit.

    Exit codes: 0 done, 1 failed, 2 settings that cannot work. A sweep (-m) exits with the first
    code that is not 0.
    """
    sys.exit(run_jobs(_task, "draw", unshared="draw.out"))


def _task(job: CommandJob) -> int:
    try:
        out = job.config.draw.out
        given = {word.lstrip("+").partition("=")[0] for word in job.words}
        write_picture(draw(job.config, columns_of_terminal(out), given), out)
    except (GpipeError, OSError) as error:
        return print_error(error)
    return ExitCode.DONE


if __name__ == "__main__":
    main()
