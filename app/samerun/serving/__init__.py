"""Serving: a predictor that stays in memory, dynamic batching, a JSON API over HTTP and a web page."""
