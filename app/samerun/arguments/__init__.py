"""Arguments: dataclasses from the command line and YAML, and the groups that tasks share. Nothing here needs
torch.
"""
