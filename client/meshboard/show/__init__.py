"""What the command prints: results on standard output, how it goes on standard error."""
