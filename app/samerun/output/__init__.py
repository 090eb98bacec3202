"""The run's folder and its files: atomic writes, predictions, status, versions. Also console output and a
writer thread.
"""
