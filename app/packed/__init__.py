"""Encoders that compute on the tokens of a batch without its padding."""
