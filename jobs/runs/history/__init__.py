"""What attempts sent, kept in columnar files after their streams are gone; docs/explanation/history.md."""
