"""`python -m gpipe_hpc.bench`: measure the speed of a model over a sweep of settings.

`sweep` lists the points, `running` starts the processes of each, `point` runs in them.
"""
