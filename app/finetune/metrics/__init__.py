"""Metrics: functions of the predictions and references of all rows, and `evaluate.Metric` classes around them.

They know no model and no launch.
May import: finetune.errors.
"""
