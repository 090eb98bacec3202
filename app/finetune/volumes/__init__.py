"""Volumes: NIfTI files found, checked, brought into one orientation and spacing; patches, pictures, predictions in the input's
grid; MONAI's U-Net and sliding windows. Nothing here trains.

May import: finetune.arguments, finetune.errors, finetune.models, finetune.output, finetune.reading, finetune.reports,
finetune.task.
"""
