"""A machine with torch and numpy alone: what else the package may use is not to be found there."""

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
    """Return an environment whose Pythons, and those that they start, find none of it."""
    (folder / "sitecustomize.py").write_text(_BLOCKER)
    paths = [str(folder), *filter(None, [environ.get("PYTHONPATH")])]
    # Hydra is still installed, with a plugin of pytest's that loads it.
    return {**environ, "PYTHONPATH": ":".join(paths), "PYTEST_ADDOPTS": "-p no:hydra_pytest"}
