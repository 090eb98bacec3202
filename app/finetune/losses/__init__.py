"""Losses for multi-label classification and segmentation.

May import: finetune.kernels.
"""
