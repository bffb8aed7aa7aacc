"""`python -m gpipe_hpc.bench`: the speed of a model and settings over a sweep: a table and a plot.

`sweep` lists the points, `running` starts the processes of each, `point` runs in them.
"""
