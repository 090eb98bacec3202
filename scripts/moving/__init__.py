"""Shared by scripts/parity.py, other scripts and the parity tests: launch settings, recorded steps,
comparison of two runs."""
