"""Benchmarks of gpipe_hpc and its peers, interleaved in one run on one machine. Not in the wheel.

`python -m benchmarks` is the short form, `python -m benchmarks.peers.run` the long one.
"""
