"""What a browser sees while a job runs: telemetry streams and sockets."""
