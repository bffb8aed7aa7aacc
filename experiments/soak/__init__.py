"""Inject random faults into runs, which must end with the same result as without faults.

python -m experiments.soak faults=100 seed=0
"""
