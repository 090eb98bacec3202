"""What scripts/parity.py and the tests of parity share: ways to launch a job, and what two runs of it have in common."""
