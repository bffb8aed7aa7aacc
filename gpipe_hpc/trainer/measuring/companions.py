"""Processes that compute, while layers are timed here, as the other ranks of the host will."""

import json
import logging
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Final, NamedTuple

from gpipe_hpc.comm.net.pickling import dumps
from gpipe_hpc.device.cores.to_come import Share
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.errors import GpipeError
from gpipe_hpc.settings import Config

log = logging.getLogger("gpipe_hpc.pipeline")

READY: Final = b"ready\n"
_MOST: Final = 15  # processes
_PROCESS_BYTES: Final = 4e8  # of host memory, beside layers
_SHARE: Final = 0.5  # of the host's free memory
_READY_S: Final = 60.0
# What this process can import, its companion can: classes of the user's layers among it.
_BOOT: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from gpipe_hpc.trainer.measuring.companion import main; main()"
)
# A companion is no rank, whatever a launcher has told the process that starts it.
_OF_LAUNCHERS: Final = (
    *("RANK", "WORLD_", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_"),
    *("OMPI_", "PMI_", "PMIX_", "MPI_", "MV2_", "SLURM_"),
)


@contextmanager
def companions(
    config: Config, num_samples: int, share: Share, layer_bytes: float
) -> Iterator[None]:
    """Let other processes run the model's layers within the block, over and over again.

    `num_samples`: of a micro-batch. As many processes as other ranks of the host compute at once,
    each on as many threads; 15 at most, and no more than half of the host's free memory holds, each
    with 400 MB and `layer_bytes`. The block begins when all are about to compute. What fails is
    told in the log, and the block goes on with the others.
    """
    wanted = min(_MOST, share.num_others, _that_fit(layer_bytes))
    with ExitStack() as stack:
        others: list[_Companion] = []
        failed = []
        if wanted < min(_MOST, share.num_others):
            failed.append(f"memory for {wanted}")
        try:
            for _ in range(wanted):
                other = _companion(config, num_samples, share.num_threads)
                others.append(stack.enter_context(other))
        except (OSError, GpipeError) as error:
            failed.append(f"{type(error).__name__}: {error}")
        until_s = time.monotonic() + _READY_S
        failed += filter(None, [other.why_not_ready(until_s) for other in others])
        yield
        failed += filter(None, [other.why_ended() for other in others])
        if failed:
            log.warning(
                "partition: layers were timed while fewer than %d other processes of this host "
                "computed (%s); times may be about 10 %% too short",
                min(_MOST, share.num_others),
                failed[0],
            )


def _that_fit(layer_bytes: float) -> int:
    free = HostDevice().memory_free()
    return _MOST if free is None else int(_SHARE * free / (_PROCESS_BYTES + layer_bytes))


class _Companion(NamedTuple):
    process: "subprocess.Popen[bytes]"
    said: IO[bytes]

    def why_not_ready(self, until_s: float) -> str:
        """Wait until it is about to compute; return what keeps it from that, empty if nothing."""
        output = self.process.stdout
        assert output is not None, "a pipe"
        come = select.poll()
        come.register(output, select.POLLIN)
        if not come.poll(1e3 * max(0.0, until_s - time.monotonic())):
            self.process.kill()
            return f"one that is not ready after {_READY_S:.0f} s"
        if not output.readline():
            self.process.wait()  # it has ended, or is about to: nothing else closes that pipe
        return ""

    def why_ended(self) -> str:
        """Return why it no longer computes, empty if it does."""
        code = self.process.poll()
        if code is None:
            return ""
        self.said.seek(0)
        lines = self.said.read().decode("utf-8", "replace").strip().splitlines()
        return f"one that ended with {code}" + (f" ({lines[-1]})" if lines else "")


@contextmanager
def _companion(config: Config, num_samples: int, num_threads: int) -> Iterator[_Companion]:
    """Start one; it ends with the block, and also where this process is gone."""
    settings = dumps(config, "the settings")
    modules = sorted({type(each).__module__ for each in vars(config).values()})
    about = {"modules": modules, "num_samples": num_samples, "num_bytes": len(settings)}
    lines = f"{json.dumps(sys.path)}\n{json.dumps(about)}\n"
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(_OF_LAUNCHERS)}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(num_threads))
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            process_group=0,  # Ctrl-C is for this process, which ends them
            env=inherited | threads,
        )
        assert process.stdin is not None and process.stdout is not None, "pipes"
        try:
            with suppress(OSError):  # why it has ended is told by what it said
                process.stdin.write(lines.encode() + settings)
                process.stdin.flush()
            yield _Companion(process, said)
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with suppress(OSError):
                    stream.close()
