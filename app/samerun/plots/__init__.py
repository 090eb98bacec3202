"""Figures and tables of the best model for report.html, by kind of target: labels, titles, classes, masks.
Tasks call it at the end of a run.
"""
