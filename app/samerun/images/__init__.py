"""Data and models of image tasks (2-D): sources, decoding, augmentation, preprocessing, classification and
segmentation heads. Images are decoded lazily, when a batch needs them.
"""
