"""A folder for PYTHONPATH: Python runs its module `sitecustomize` in each process that a launcher starts."""
