"""Figures that judge a model, as pure functions over all the rows at once. Knows no model and no launch."""
