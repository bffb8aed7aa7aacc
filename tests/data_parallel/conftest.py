"""Import the fixture `plain` of the engine tests."""

from tests.engine.conftest import plain

__all__ = ["plain"]
