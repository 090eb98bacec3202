"""Training: the optimizer step (`step.py`), the loop (`loop.py`), evaluation, and the choice of the best
models. Independent of tasks, file formats and launchers.

May import: samerun.arguments, samerun.batching, samerun.checkpoints, samerun.errors, samerun.kernels,
samerun.launching, samerun.optimizers, samerun.output, samerun.plan, samerun.reading, samerun.reports,
samerun.task.
"""
