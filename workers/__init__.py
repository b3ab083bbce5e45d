"""Programs of a GPU host: host worker, supervisor, meter, trainer and benchmarks. No Django."""
