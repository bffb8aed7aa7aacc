"""`python -m gpipe_hpc.train`: train a model, in one process or under a launcher."""

import os

from gpipe_hpc.comm.watchdog.output_streams import protect_streams
from gpipe_hpc.trainer.signals import StopRequest


def main() -> None:
    """Compose the settings from the command line, train, and exit with the run's exit code."""
    # Torch's C++ code logs a lost connection as a warning with 20 stack frames, before our message
    # with the cause. Torch reads the level once, when it is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    protect_streams()
    # Before torch is imported: that takes seconds, and a signal may arrive meanwhile.
    stop = StopRequest()
    stop.listen()
    from gpipe_hpc.trainer.command import run_command

    run_command(stop)


if __name__ == "__main__":
    main()
