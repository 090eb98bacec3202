"""The memory of a training step, estimated before the first one: state by arithmetic, activations by a dry run.

The estimate covers any module and input, DDP, ZeRO with offload, autocast and recomputed activations.

May import: finetune.kernels, finetune.launching, finetune.plan, finetune.task.
"""
