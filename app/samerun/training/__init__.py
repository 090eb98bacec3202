"""Training: the optimizer step (`step.py`), the loop (`loop.py`), evaluation, and the choice of the best
models. Independent of tasks, file formats and launchers.
"""
