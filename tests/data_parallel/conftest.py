"""Fixture `plain` of the engine's tests, for the tests of data parallelism."""

from tests.engine.conftest import plain

__all__ = ["plain"]
