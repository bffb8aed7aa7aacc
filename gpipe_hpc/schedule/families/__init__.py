"""The published schedules, one file per family: functions that return a compute-only table."""
