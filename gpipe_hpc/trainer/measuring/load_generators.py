"""Load generators: processes that compute like the other ranks of a host while layers are timed."""

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
from gpipe_hpc.device.cores.planned_ranks import CpuShare
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.errors import GpipeError
from gpipe_hpc.settings import Config

log = logging.getLogger("gpipe_hpc.pipeline")

READY: Final = b"ready\n"
_MOST: Final = 15  # processes
_PROCESS_BYTES: Final = 4e8  # host memory of a process besides layers
_SHARE: Final = 0.5  # usable fraction of the host's free memory
_READY_S: Final = 60.0
# A load generator uses this process's sys.path, so that it can import the user's layers.
_BOOT: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from gpipe_hpc.trainer.measuring.load_generator import main; main()"
)
# A load generator is not a rank: it must not inherit the launcher's environment variables.
_OF_LAUNCHERS: Final = (
    *("RANK", "WORLD_", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_"),
    *("OMPI_", "PMI_", "PMIX_", "MPI_", "MV2_", "SLURM_"),
)


@contextmanager
def load_generators(
    config: Config, num_samples: int, share: CpuShare, layer_bytes: float
) -> Iterator[None]:
    """Run the model's layers in other processes, repeatedly, within the context.

    One process runs for each other rank of the host that will compute at the same time, with the
    same number of threads: at most 15 processes, which use at most half of the host's free memory
    (400 MB plus `layer_bytes` each). The context starts when all are ready to compute. If a process
    fails, this is logged and the others continue.

    Args:
        config: the settings.
        num_samples: samples of a micro-batch.
        share: number of other ranks and of threads.
        layer_bytes: memory of the layers.
    """
    wanted = min(_MOST, share.num_others, _that_fit(layer_bytes))
    with ExitStack() as stack:
        others: list[_LoadGenerator] = []
        failed = []
        if wanted < min(_MOST, share.num_others):
            failed.append(f"memory for {wanted}")
        try:
            for _ in range(wanted):
                other = _load_generator(config, num_samples, share.num_threads)
                others.append(stack.enter_context(other))
        except (OSError, GpipeError) as error:
            failed.append(f"{type(error).__name__}: {error}")
        until_s = time.monotonic() + _READY_S
        failed += filter(None, [other.why_not_ready(until_s) for other in others])
        yield
        failed += filter(None, [other.why_ended() for other in others])
        if failed:
            log.warning(
                "partition: layers were timed with fewer than %d load-generating processes "
                "(%s); times may be about 10 %% too short",
                min(_MOST, share.num_others),
                failed[0],
            )


def _that_fit(layer_bytes: float) -> int:
    free = HostDevice().memory_free()
    return _MOST if free is None else int(_SHARE * free / (_PROCESS_BYTES + layer_bytes))


class _LoadGenerator(NamedTuple):
    process: "subprocess.Popen[bytes]"
    said: IO[bytes]

    def why_not_ready(self, until_s: float) -> str:
        """Wait until the process is ready to compute; return an error message, empty on success.

        `until_s` is the deadline of `time.monotonic`.
        """
        output = self.process.stdout
        assert output is not None, "a pipe"
        come = select.poll()
        come.register(output, select.POLLIN)
        if not come.poll(1e3 * max(0.0, until_s - time.monotonic())):
            self.process.kill()
            return f"one was not ready after {_READY_S:.0f} s"
        if not output.readline():
            self.process.wait()  # a closed pipe means that it is ending
        return ""

    def why_ended(self) -> str:
        """Return why the process has ended; empty if it is still computing."""
        code = self.process.poll()
        if code is None:
            return ""
        self.said.seek(0)
        lines = self.said.read().decode("utf-8", "replace").strip().splitlines()
        return f"one ended with exit code {code}" + (f" ({lines[-1]})" if lines else "")


@contextmanager
def _load_generator(config: Config, num_samples: int, num_threads: int) -> Iterator[_LoadGenerator]:
    """Start a load-generating process, which ends with the context or when this process dies."""
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
            process_group=0,  # Ctrl-C must reach only this process, which stops the others
            env=inherited | threads,
        )
        assert process.stdin is not None and process.stdout is not None, "pipes"
        try:
            with suppress(OSError):  # its standard error shows why it has ended
                process.stdin.write(lines.encode() + settings)
                process.stdin.flush()
            yield _LoadGenerator(process, said)
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with suppress(OSError):
                    stream.close()
