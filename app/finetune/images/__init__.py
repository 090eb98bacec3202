"""Pictures in two dimensions: where they are found, how they are decoded, varied and brought to a model's size, and what
image tasks share. Nothing is decoded before a batch needs it.

May import: finetune.arguments, finetune.errors, finetune.launching, finetune.models, finetune.output, finetune.plan,
finetune.reading, finetune.reports, finetune.task.
"""
