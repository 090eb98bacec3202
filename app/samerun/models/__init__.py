"""Models: loading and checks of transformers' models, encoder-decoders, adapters, quantization, word
attributions, batch norm, and a small CNN. Nothing here trains.
"""
