"""Random faults, one after another, in runs that must end as if none of them had happened.

python -m experiments.soak faults=100 seed=0
"""
