"""Parts of make_sample_data.py: each module writes one kind of data."""
