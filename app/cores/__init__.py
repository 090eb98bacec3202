"""The cores of a CPU: threads that compute alone, in memory that they keep."""
