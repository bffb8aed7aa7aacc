"""The tests; a package so that they may share `tests.support`."""
