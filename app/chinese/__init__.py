"""Chinese text: tokenizing by words, and decoding without the spaces that a tokenizer adds."""
