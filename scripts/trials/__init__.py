"""Shared by scripts/sweep.py and scripts/cross_validate.py: many runs of one command, each in its own
folder."""
