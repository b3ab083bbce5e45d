"""What Prometheus and OpenTelemetry are told: the same figures, from the database and the newest telemetry."""
