"""Segmentation of volumes (3-D): NIfTI files, resampling, patches, augmentation, U-Net, predictions."""
