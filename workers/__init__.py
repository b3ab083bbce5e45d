"""What runs on a GPU host: the host worker, the supervisor, the meter and the trainer. No Django."""
