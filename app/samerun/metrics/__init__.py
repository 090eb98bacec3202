"""Metrics: functions of the predictions and references of all rows. --metrics adds metrics of `evaluate`.

They do not depend on models or launches.
"""
