"""Reports of a run: history, trackers, figures, model card, report.html. Rank 0 writes them.

Nothing here changes the training.
"""
