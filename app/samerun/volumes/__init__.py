"""Segmentation of volumes (3-D). NIfTI files, resampling, patches, augmentation, MONAI's U-Net, predictions.

May import: samerun.arguments, samerun.batching, samerun.errors, samerun.output, samerun.plan,
samerun.reading, samerun.reports, samerun.task.
"""
