"""What scripts/sweep.py and scripts/cross_validate.py share: many runs of one command, each in a folder of its own."""
