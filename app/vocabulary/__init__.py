"""Vocabularies made from the user's own texts, so that a run from scratch needs no download."""
