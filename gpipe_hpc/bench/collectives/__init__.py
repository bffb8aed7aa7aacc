"""Our algorithms of collectives beside their closed forms and the backend's own.

`point` is what the ranks of one number do, `figures` what they found and its tables, `plot` the
picture, `workload` the whole of it.
"""
