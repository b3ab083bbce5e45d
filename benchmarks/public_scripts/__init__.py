"""Run public training scripts with and without the meter, and compare losses, step times, and CPU time."""
