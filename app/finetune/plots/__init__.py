"""How good a model is, as figures and tables for the report page and the model card: labels, titles, classes of pictures,
masks. Tasks call it once, at the end of a run.

May import: finetune.metrics, finetune.reports, finetune.task.
"""
