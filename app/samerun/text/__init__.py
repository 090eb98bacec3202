"""Text tasks: what they share, label columns, classifier heads, titles, tokenizers and vocabularies."""
