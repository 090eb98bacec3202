"""Metrics: functions of the predictions and references of all rows, and `evaluate.Metric` classes around
them.

They do not depend on models or launches.
May import: samerun.errors.
"""
