"""Segmentation of volumes (3-D). NIfTI files, resampling, patches, augmentation, MONAI's U-Net, predictions.

May import: finetune.arguments, finetune.batching, finetune.errors, finetune.output, finetune.plan, finetune.reading,
finetune.reports, finetune.task.
"""
