"""What a machine must have for these tests: a missing tool is an error that names its package."""

import os
import shutil

# Debian's package for each tool.
PACKAGES = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "munged": "munge",
    "mungekey": "munge",
    "podman": "podman",
    "buildah": "buildah",
    "runc": "runc",
    "debootstrap": "debootstrap",
    "kubectl": "kubectl",  # of https://pkgs.k8s.io, 1.29 or newer
}
_FOLDERS = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


class MissingToolError(RuntimeError):
    """This machine lacks a tool."""


def tool(name: str) -> str:
    """Return the path of a tool, also of one in a folder that only root has in PATH."""
    path = shutil.which(name, path=_FOLDERS)
    if path is None:
        raise MissingToolError(
            f"cluster tests: expected {name} on this machine, got none in {_FOLDERS}; install it: "
            f"apt-get install --no-install-recommends {PACKAGES[name]}"
        )
    return path
