"""Send telemetry and job changes to browsers and clients while a job runs."""
