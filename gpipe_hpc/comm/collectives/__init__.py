"""Collectives of our own over sends and receives: plans, and what carries them out.

`plan` defines a plan; `ring`, `halving`, `tree`, `direct` and `hierarchy` make plans; `menu` starts
them over a group; `carrier` and `on_stream` carry them out. Planners are pure: what a rank sends is
counted without sending it. Algorithms that lose to the backend's own, their closed forms and a
comparison are in `experiments/outer/collectives`.
"""
