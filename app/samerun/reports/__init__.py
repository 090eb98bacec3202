"""Reports of a run: history, trackers, profile, figures, data report, predictions, model card, report.html,
upload to the hub.

Rank 0 writes them. Nothing here changes the training.
"""
