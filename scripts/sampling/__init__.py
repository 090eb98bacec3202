"""Parts of make_sample_data.py: docstrings as plain text, drawn images and volumes."""
