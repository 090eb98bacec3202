"""Strict readers of the user's files, and what is kept of them on disk for later starts: rows and tokens.

Errors name file, line and field; nothing is guessed silently, and nothing here needs torch.
May import: finetune.errors, finetune.garbage_collection, finetune.output.
"""
