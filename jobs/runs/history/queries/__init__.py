"""Answer queries of histories."""
