"""What a run tells its reader: progress, history, trackers, profile, metrics and predictions, and the model card.

Everything is written by rank 0 from what the run has computed; nothing here changes the training.

May import: finetune.errors, finetune.launching, finetune.metrics, finetune.output, finetune.task.
"""
