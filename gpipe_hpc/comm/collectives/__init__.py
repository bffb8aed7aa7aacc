"""Collectives of our own over sends and receives: plans, what carries them out, what they cost.

`plan` says what a plan is; `ring`, `halving`, `tree`, `chain`, `direct` and `hierarchy` make plans;
`menu` knows them by name; `running` starts them; `costs`, `fitting` and `tuning` tell what they
take and which is best. Planners are pure: what a rank sends is counted without sending it.
"""
