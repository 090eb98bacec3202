"""Parts of `samerun data-report`."""
