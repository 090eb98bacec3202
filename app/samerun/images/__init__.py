"""Data and models of image tasks (2-D)."""
