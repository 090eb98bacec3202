"""The engine: it runs any task from its arguments to its output files, under any launch. `application.py` is its table of
contents; the modules beside it are used by it alone.

May import: nothing.
"""
