"""Segmentation of volumes (3-D): NIfTI files, resampling, patches, augmentation, MONAI's U-Net, masks."""
