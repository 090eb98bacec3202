"""The training itself: one optimizer step, the loop, evaluation, which models are kept. It knows no task, no file format and no
launcher; `loop.py` and `step.py` are all there is to a training step.

May import: finetune.arguments, finetune.batching, finetune.checkpoints, finetune.errors, finetune.kernels, finetune.launching,
finetune.optimizers, finetune.output, finetune.plan, finetune.reading, finetune.reports, finetune.task.
"""
