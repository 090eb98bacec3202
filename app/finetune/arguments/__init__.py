"""Arguments: dataclasses from the command line and YAML, and the groups that tasks share. Nothing here needs torch.

May import: finetune.errors, finetune.optimizers, finetune.output, finetune.plan, finetune.reading, finetune.schedules.
"""
