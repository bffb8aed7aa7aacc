"""`python -m gpipe_hpc.train`: train a model, in one process or under a launcher."""

from gpipe_hpc.comm.saying import keep_streams
from gpipe_hpc.training.signals import StopRequest


def main() -> None:
    """Compose the settings from Hydra's command line, train, and exit with the run's code."""
    keep_streams()
    # First of all: torch takes seconds to load, and a signal may come meanwhile.
    stop = StopRequest()
    stop.listen()
    from gpipe_hpc.training.command import run_command

    run_command(stop)


if __name__ == "__main__":
    main()
