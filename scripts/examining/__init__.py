"""Parts of scripts/data_report.py."""
