"""`python -m gpipe_hpc.bench`: measure the speed of a model over a sweep of settings.

`sweep` lists the points of the sweep, `running` starts processes for each, `point` is the program
of these processes.
"""
