"""Sample data that is drawn: for tasks on images and volumes, without a download. make_sample_data.py calls it."""
