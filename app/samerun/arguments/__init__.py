"""Arguments: dataclasses from the command line and YAML, and the groups that tasks share. Nothing here needs
torch.

May import: samerun.errors, samerun.optimizers, samerun.output, samerun.plan, samerun.reading,
samerun.schedules.
"""
