"""Data and models of image tasks (2-D). A batch decodes its images when it is needed."""
