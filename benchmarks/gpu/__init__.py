"""What a machine with GPUs has to show: `python -m benchmarks.gpu`."""
