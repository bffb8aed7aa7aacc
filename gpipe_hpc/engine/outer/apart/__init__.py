"""Replicas that train apart and meet every H steps: local SGD and DiLoCo.

`fragment` averages the parameters of one bucket and steps on them; `rounds` says when, over all
fragments of a rank, and keeps what a checkpoint needs.
"""
