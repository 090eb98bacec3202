"""Shared by `samerun parity` and the parity tests: launch settings, recorded steps,
comparison of two runs."""
