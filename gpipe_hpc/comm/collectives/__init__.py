"""Collectives of our own over sends and receives: plans, what carries them out, what they cost.

`plan` says what a plan is; `ring`, `halving`, `tree`, `chain`, `direct` and `hierarchy` make plans;
`menu` knows them by name and starts them; `carrier` and `on_stream` carry them out. `costs` has
the closed forms, `fitting` fits a link to measured times, `tuning` and `tuned` choose by them.
Planners are pure: what a rank sends is counted without sending it.
"""
