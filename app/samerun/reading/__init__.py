"""Strict readers of the user's files, and caches of their rows and tokens.

Errors name file, line and field. Values are never guessed, and nothing here needs torch.
"""
