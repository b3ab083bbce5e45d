"""Record and query the telemetry of attempts after their streams are gone (docs/explanation/history.md)."""
