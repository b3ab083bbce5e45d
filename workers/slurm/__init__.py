"""What runs inside a Slurm allocation: a supervisor on each node, which speaks to the board over HTTPS alone."""
