"""Shared by tools that repeat a job: launch settings, recorded steps, comparison of two runs."""
