"""The image of the Dockerfile, built for CPUs as its first lines say, and containers of it."""

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
    # Where podman itself may not raise limits, it must not try.
    *("--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096"),
)


class Containers:
    """Images and containers in a storage of its own, under one folder."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.folder = folder
        self._environ = {k: v for k, v in environ.items() if k != "STORAGE_DRIVER"}
        self._storage = (f"--root={folder}/storage", f"--runroot={folder}/running")
        self._names: list[str] = []

    def build(self, repository: Path) -> None:
        """Build the image; error of the tool, with all that it said, if it cannot be."""
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
        """Do what Apptainer does with its definition, for CPUs, in a Debian without Python."""
        if self._has(DEFINED):
            return
        # A certificate of pip's is mounted where this package would put its own.
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
        # Whole lines: one name begins with the other.
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
        """Run a container to its good end; return what it said."""
        return self._run("podman", f"--runtime={tool('runc')}", "run", "--rm", *_HARDENED, *words)

    def start(self, output: Path, *words: str) -> "Container":
        """Start a container."""
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
        """Start a container that podman may start again; it has no terminal."""
        name = f"gpipe_{os.getpid()}_{len(self._names)}"
        self._names.append(name)
        runtime = f"--runtime={tool('runc')}"
        self._run("podman", runtime, "run", "--detach", f"--name={name}", *_HARDENED, *words)
        return KeptContainer(lambda verb, *more: self._run("podman", runtime, verb, *more, name))

    def stop(self) -> None:
        """End all containers."""
        if self._names:
            self._run("podman", "rm", "--force", "--ignore", "--time=0", *self._names)
        self._names.clear()

    def remove(self) -> None:
        """Remove images and all else."""
        self._run("podman", "rmi", "--all", "--force")
        self._run("podman", "system", "reset", "--force")
        shutil.rmtree(self.folder, ignore_errors=True)


class Container:
    """A container under way."""

    def __init__(self, kill: Sequence[str], process: subprocess.Popen[bytes], output: Path) -> None:
        self._kill, self._process, self._output = kill, process, output

    @property
    def output(self) -> str:
        """Return what came out so far."""
        return self._output.read_text(errors="replace")

    def wait(self, limit_s: float = 180.0) -> int:
        """Return the exit code, once it has ended."""
        return self._process.wait(limit_s)

    def kill(self) -> None:
        """End all of it at once."""
        subprocess.run(self._kill, check=True, capture_output=True)


class KeptContainer:
    """A container that outlives its end, and may be started again."""

    def __init__(self, run: Callable[..., str]) -> None:
        self._run = run

    @property
    def output(self) -> str:
        """Return what came out so far, of all its starts."""
        return self._run("logs")

    @property
    def state(self) -> str:
        """Return whether it runs, its exit code, and how often podman has started it again."""
        return self._run(
            "inspect", "--format={{.State.Status}} {{.State.ExitCode}} {{.RestartCount}}"
        ).strip()

    def processes(self, word: str) -> list[int]:
        """Return the numbers, on this machine, of its processes whose command has this word."""
        said = self._run("container", "inspect", "--format={{.State.Pid}}")
        first = int(said)
        children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        return [pid for pid in map(int, children) if word in _command(pid)]

    def stop(self) -> None:
        """End it by SIGTERM, in the time that it was started with."""
        self._run("stop")

    def start(self) -> None:
        """Start it again."""
        self._run("start")


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def _of_pip() -> list[Path]:
    """Return the files and folders that pip is configured with here: the build needs them, too."""
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
