"""`python -m gpipe_hpc`: list the commands of the package."""

import sys

from gpipe_hpc.comm.watchdog.saying import code_of_output, keep_streams
from gpipe_hpc.config import list_of_commands

if __name__ == "__main__":
    keep_streams()
    print(list_of_commands())
    sys.exit(code_of_output(0))
