"""Arguments: dataclass fields on the command line and in YAML, and the groups that all kinds of tasks share. Groups check
themselves; nothing here needs torch.

May import: finetune.errors, finetune.optimizers, finetune.plan, finetune.schedules.
"""
