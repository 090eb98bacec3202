"""Checkpoints: their format, saving and restoring, sharded ones, and copies for machines without a shared disk.

A checkpoint is complete or absent, and a run that resumes from one ends with the bytes of the run that never stopped.

May import: finetune.errors, finetune.launching, finetune.optimizers, finetune.output.
"""
