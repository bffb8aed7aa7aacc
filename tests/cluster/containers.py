"""The image of the Dockerfile, built for CPUs, and containers that run it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.cluster.apptainer import SCRIPTS, TEST, definition, files, filled
from tests.cluster.tools import MissingToolError, tool

BASE = "localhost/base"
IMAGE = "localhost/gpipe-hpc"
BARE = "localhost/bare"
DEFINED = "localhost/gpipe-hpc-sif"
_SUITE = "bookworm"
_HARDENED = (
    *("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--shm-size=64m"),
    # Set limits explicitly, as podman may not be allowed to raise them.
    *("--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096"),
)


class Containers:
    """Images and containers in a separate storage below one folder."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.folder = folder
        self._environ = {k: v for k, v in environ.items() if k != "STORAGE_DRIVER"}
        self._storage = (f"--root={folder}/storage", f"--runroot={folder}/running")
        self._names: list[str] = []

    def build(self, repository: Path) -> None:
        """Build the image of the Dockerfile; on failure, the error contains the tool's output."""
        if self._has(IMAGE):
            return
        self._import_base(BASE, "python3,python3-venv,ca-certificates")
        mounts = [f"--volume={path}:{path}:ro" for path in _of_pip()]
        index = self._environ.get("TORCH_INDEX", "")
        self._run(
            *("buildah", "bud", "--format=docker", "--isolation=chroot", "--network=host"),
            *("--pull-never", f"--build-arg=BASE={BASE}", f"--build-arg=TORCH_INDEX={index}"),
            *(*mounts, f"--file={repository}/Dockerfile", f"--tag={IMAGE}", str(repository)),
        )
        cuda = "import torch; print(torch.version.cuda)"
        if self.output("--entrypoint=python", IMAGE, "-c", cuda).strip() != "None":
            raise MissingToolError(
                "cluster tests: expected torch for CPUs in the image, got the one for CUDA, which "
                "takes gigabytes; set TORCH_INDEX to where pip finds torch for CPUs, as "
                "https://download.pytorch.org/whl/cpu"
            )

    def build_defined(self, repository: Path) -> None:
        """Build the image of Apptainer's definition file for CPUs, from a Debian without Python."""
        if self._has(DEFINED):
            return
        # Install certificates first: pip's certificate is mounted over a file of this package.
        self._import_base(BARE, "ca-certificates")
        index = self._environ.get("TORCH_INDEX") or "none"
        found = filled(definition(repository), BASE=BARE, TORCH_INDEX=index)
        (name,) = self._run("buildah", "from", "--pull-never", BARE).split()
        for source, target in files(found):
            self._run("buildah", "copy", "--quiet", name, str(repository / source), target)
        for section, target in SCRIPTS.items():
            path = self.folder / section
            path.write_text(found[section])
            self._run("buildah", "copy", "--quiet", name, str(path), target)
        mounts = [f"--volume={path}:{path}:ro" for path in _of_pip()]
        within = ("buildah", "run", "--isolation=chroot", "--network=host", *mounts, name, "--")
        self._run(*within, "/bin/sh", "-ex", "-c", found["post"])
        self._run(*within, "/bin/sh", TEST)
        self._run("buildah", "commit", "--quiet", "--rm", name, DEFINED)

    def _has(self, image: str) -> bool:
        # Compare whole lines, since one name is a prefix of another.
        return image in self._run("podman", "images", "--format={{.Repository}}").split()

    def _import_base(self, image: str, packages: str) -> None:
        root = self.folder / "base"
        more = f"--include={packages}"
        self._run("debootstrap", "--variant=minbase", more, _SUITE, str(root))
        tar = subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE)
        with tar:
            self._run("podman", "import", "-", image, source=tar)
        shutil.rmtree(root)

    def _run(self, name: str, *words: str, source: subprocess.Popen[bytes] | None = None) -> str:
        done = subprocess.run(
            [tool(name), *(self._storage if name != "debootstrap" else ()), *words],
            env=self._environ,
            stdin=subprocess.DEVNULL if source is None else source.stdout,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, f"{name} {words} ended with {done.returncode}: {done.stdout}"
        return done.stdout

    def output(self, *words: str) -> str:
        """Run a container, assert that it succeeds, and return its output."""
        return self._run("podman", f"--runtime={tool('runc')}", "run", "--rm", *_HARDENED, *words)

    def start(self, output: Path, *words: str) -> "Container":
        """Start a container that writes its output to a file and is removed when it ends."""
        name = f"gpipe_{os.getpid()}_{len(self._names)}"
        self._names.append(name)
        podman = [tool("podman"), *self._storage, f"--runtime={tool('runc')}"]
        with output.open("w") as stream:
            process = subprocess.Popen(
                [*podman, "run", "--rm", f"--name={name}", *_HARDENED, *words],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        return Container([*podman, "kill", "--signal=KILL", name], process, output)

    def keep(self, *words: str) -> "KeptContainer":
        """Start a container in the background that can be restarted after it has ended."""
        name = f"gpipe_{os.getpid()}_{len(self._names)}"
        self._names.append(name)
        runtime = f"--runtime={tool('runc')}"
        self._run("podman", runtime, "run", "--detach", f"--name={name}", *_HARDENED, *words)
        return KeptContainer(lambda verb, *more: self._run("podman", runtime, verb, *more, name))

    def stop(self) -> None:
        """Kill and remove all containers."""
        if self._names:
            self._run("podman", "rm", "--force", "--ignore", "--time=0", *self._names)
        self._names.clear()

    def remove(self) -> None:
        """Remove all images and the storage."""
        self._run("podman", "rmi", "--all", "--force")
        self._run("podman", "system", "reset", "--force")
        shutil.rmtree(self.folder, ignore_errors=True)


class Container:
    """A running container."""

    def __init__(self, kill: Sequence[str], process: subprocess.Popen[bytes], output: Path) -> None:
        self._kill, self._process, self._output = kill, process, output

    @property
    def output(self) -> str:
        """Return the output so far."""
        return self._output.read_text(errors="replace")

    def wait(self, limit_s: float = 180.0) -> int:
        """Wait until the container has ended; return its exit code."""
        return self._process.wait(limit_s)

    def kill(self) -> None:
        """Kill all processes of the container."""
        subprocess.run(self._kill, check=True, capture_output=True)


class KeptContainer:
    """A container that remains after it has ended, and can be restarted."""

    def __init__(self, run: Callable[..., str]) -> None:
        self._run = run

    @property
    def output(self) -> str:
        """Return the output of all starts so far."""
        return self._run("logs")

    @property
    def state(self) -> str:
        """Return status, exit code and number of restarts, separated by spaces."""
        return self._run(
            "inspect", "--format={{.State.Status}} {{.State.ExitCode}} {{.RestartCount}}"
        ).strip()

    def processes(self, word: str) -> list[int]:
        """Return the process ids, on this machine, of processes whose command contains `word`."""
        said = self._run("container", "inspect", "--format={{.State.Pid}}")
        first = int(said)
        children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        return [pid for pid in map(int, children) if word in _command(pid)]

    def stop(self) -> None:
        """Send SIGTERM, and kill the container after its stop timeout."""
        self._run("stop")

    def start(self) -> None:
        """Start the container again."""
        self._run("start")


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def _of_pip() -> list[Path]:
    """Return the files and folders that pip's configuration names, which the build needs."""
    pip = [sys.executable, "-m", "pip", "config"]
    said = subprocess.run([*pip, "debug"], capture_output=True, text=True, check=True).stdout
    files = [
        Path(line.partition(",")[0].strip()) for line in said.splitlines() if "exists: True" in line
    ]
    values = subprocess.run([*pip, "list"], capture_output=True, text=True, check=True).stdout
    words = values.replace("'", " ").replace("=", " ").split()
    named = [Path(word.removeprefix("file://")) for word in words]
    named = [path.parent if path.name == "simple" else path for path in named]
    return sorted({path for path in [*files, *named] if path.is_absolute() and path.exists()})
