"""Tests of gpipe_hpc, as a package so that test files can import `tests.support`."""
