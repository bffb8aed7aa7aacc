"""`python -m gpipe_hpc`: list the commands of the package."""

import sys

from gpipe_hpc.comm.watchdog.output_streams import output_exit_code, protect_streams
from gpipe_hpc.config import list_of_commands

if __name__ == "__main__":
    protect_streams()
    print(list_of_commands())
    sys.exit(output_exit_code(0))
