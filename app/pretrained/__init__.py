"""Models and tokenizers of transformers: loaded with clear messages, exported so that no code of ours is needed."""
