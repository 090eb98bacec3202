"""Losses for multi-label classification and segmentation. Each is tested against its formula."""
