"""Simulation of an installation with only torch and NumPy: optional packages cannot be imported."""

from pathlib import Path

BLOCKED = ("hydra", "omegaconf", "antlr4", "rich", "fairscale", "yaml", "tensorboard", "PIL")

_BLOCKER = f"""
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Blocker())
"""


def bare_environment(environ: dict[str, str], folder: Path) -> dict[str, str]:
    """Return an environment in which Python processes cannot import the optional packages."""
    (folder / "sitecustomize.py").write_text(_BLOCKER)
    paths = [str(folder), *filter(None, [environ.get("PYTHONPATH")])]
    # Hydra is still installed, and its pytest plugin would import it.
    return {**environ, "PYTHONPATH": ":".join(paths), "PYTEST_ADDOPTS": "-p no:hydra_pytest"}
