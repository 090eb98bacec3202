"""Training: the optimizer step (`step.py`), the loop (`loop.py`), evaluation, and the choice of the best models. Independent of
tasks, file formats and launchers.

May import: finetune.arguments, finetune.batching, finetune.checkpoints, finetune.errors, finetune.kernels, finetune.launching,
finetune.optimizers, finetune.output, finetune.plan, finetune.reading, finetune.reports, finetune.task.
"""
