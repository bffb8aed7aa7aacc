"""The laboratory: contestants side by side, in one run, on one machine. Not part of the wheel.

`python -m benchmarks` is the short form, `python -m benchmarks.peers.run` the long one.
"""
