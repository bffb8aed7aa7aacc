"""Collectives built from point-to-point sends and receives, as plans and their executors.

`plan` defines the data structure; `ring`, `halving`, `tree`, `direct` and `hierarchy` make plans;
`planned` starts them over a group; `plan_executor` and `on_stream` run them. The planners are pure
functions, so the traffic of a plan can be counted without sending anything. Algorithms that are
slower than the backend's own, their closed forms and a comparison are in
`experiments/outer/collectives`.
"""
