"""Forms derived from what a spec is, and back."""
