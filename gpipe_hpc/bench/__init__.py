"""The speed of a user's own model and settings over a sweep: one table, one plot.

`sweep` lists the points, `running` starts the processes of each, `point` is what they do.
"""
