"""Title generation: encoder-decoder models for long documents, cross-entropy over title tokens, ROUGE."""
