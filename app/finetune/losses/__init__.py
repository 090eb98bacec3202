"""Losses of tasks: of labels that a row may have several of, and of segmentation. Each is tested against its formula.

May import: finetune.kernels.
"""
