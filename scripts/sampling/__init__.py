"""Parts of make_sample_data.py: generated pictures."""
