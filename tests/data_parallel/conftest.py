"""The plain loop of the engine's tests serves these, too."""

from tests.engine.conftest import plain

__all__ = ["plain"]
