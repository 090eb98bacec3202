"""Models: loading and checks of transformers' models, encoder-decoders, adapters, quantization, export, word
attributions, temperature scaling, batch norm, and a small CNN. Nothing here trains.
"""
