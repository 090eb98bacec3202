"""Text tasks: what they share (files, tokens, batches), label columns, classifier heads, titles, tokenizers
and vocabularies. Image tasks need none of it.
"""
