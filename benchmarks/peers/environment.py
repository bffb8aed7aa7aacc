"""A separate Python environment for peers that are not dependencies of this project."""

import contextlib
import re
import subprocess
import sys
import venv
from pathlib import Path

import torch

PACKAGES = ("deepspeed", "torchgpipe")
EXTENSIONS = "extensions"
# DeepSpeed compiles its collectives at their first use, which exceeds the time limit of a
# contestant. A process that is killed meanwhile leaves a lock on which later ones wait forever.
_COMPILE = f"""
import os, sys
os.environ["TORCH_EXTENSIONS_DIR"] = os.path.join(sys.prefix, "{EXTENSIONS}")
from deepspeed.comm.torch import build_shm_op
build_shm_op()
"""


class NoEnvironmentError(Exception):
    """The environment cannot be created; the message gives the reason."""


def peer_python(folder: Path) -> str:
    """Return the interpreter of an environment with the peers, which is created if missing.

    It contains the same torch as this process; if pip would install another one (for example with
    CUDA), nothing is installed. Raises NoEnvironmentError.
    """
    python = folder / "bin" / "python"
    done = folder / "peers_installed"
    if done.exists():
        return str(python)
    version = torch.__version__.split("+")[0]
    print(f"making {folder} with {', '.join(PACKAGES)} and torch {torch.__version__} ...")
    venv.create(folder, with_pip=True, clear=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={version}\n", "utf-8")
    install = [str(python), "-m", "pip", "install", "-c", str(constraints)]
    plan = _run([*install, "--dry-run", *PACKAGES])
    would = re.search(r"^Would install (.*)$", plan, re.M)
    names = would[1].split() if would else []
    wanted = f"torch-{torch.__version__}"
    foreign = [n for n in names if n.startswith(("nvidia-", "triton-"))]
    if wanted not in names or foreign:
        raise NoEnvironmentError(f"pip would not install {wanted} alone, but {names}")
    _run([*install, "--quiet", *PACKAGES])
    _run([str(python), "-c", "import torch, deepspeed, torchgpipe"])
    with contextlib.suppress(NoEnvironmentError):  # DeepSpeed also runs without it
        _run([str(python), "-c", _COMPILE])
    done.touch()
    return str(python)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoEnvironmentError(f"{' '.join(command[:4])}: {error}") from error
    if done.returncode:
        tail = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise NoEnvironmentError(f"{' '.join(command[:4])} failed: {' '.join(tail)[:200]}")
    return done.stdout


if __name__ == "__main__":
    print(peer_python(Path(sys.argv[1])))
