"""The rows of `samerun data-report` and `rows`."""
