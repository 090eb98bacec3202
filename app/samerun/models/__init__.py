"""Models: loading and checks of transformers' models, and changes to them. Nothing here trains."""
