"""Shared by `samerun sweep`, `cross-validate` and `learning-curve`: many runs of one command, each in its own
folder."""
