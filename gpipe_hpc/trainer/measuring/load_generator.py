"""Load generator process: runs a model's layers until the process that started it ends."""

import json
import os
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from importlib import import_module

from gpipe_hpc.comm.net.pickling import loads
from gpipe_hpc.device.cores.inherited import inherited_cpus
from gpipe_hpc.device.cores.machine import allowed_cpus
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.trainer.measuring.load_generators import READY
from gpipe_hpc.trainer.search.from_settings import cost_model_of_layers


def main() -> None:
    """Read the settings and micro-batch size from standard input, and run the layers repeatedly."""
    starter = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of the user's layers
    about = json.loads(sys.stdin.buffer.readline())
    for module in about["modules"]:
        import_module(module)
    config = loads(sys.stdin.buffer.read(about["num_bytes"]), "the settings")
    _leave_cores()
    threading.Thread(target=_end_with_starter, name="companion", daemon=True).start()
    cost_model = cost_model_of_layers(config, HostDevice(), about["num_samples"])
    os.write(starter, READY)
    while replace(
        cost_model
    ).times:  # a cost model measures once, when first read; its copy measures again
        pass


def _leave_cores() -> None:
    """Move this process to the cores of the job to which its parent rank is not bound."""
    given, own = inherited_cpus(), allowed_cpus()
    if given is not None and own is not None and given - own:
        with suppress(OSError):  # the cores may have been withdrawn meanwhile
            os.sched_setaffinity(0, given - own)


def _end_with_starter() -> None:
    # Returns when the other end is closed. Not with sys.stdin, since a thread waiting in it would
    # hold its lock when the interpreter exits.
    os.read(sys.stdin.fileno(), 1)
    os._exit(0)
