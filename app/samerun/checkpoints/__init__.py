"""Checkpoints: format, saving and restoring, sharded checkpoints, and copies for machines without a shared
disk.

A checkpoint is complete or absent. A resumed run ends with the same bytes as an uninterrupted one.
"""
