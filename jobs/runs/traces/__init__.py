"""Store, import, and export traced steps."""
