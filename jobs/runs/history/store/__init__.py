"""What lies on disk of an attempt: its tables, their bounds, and questions to them."""
