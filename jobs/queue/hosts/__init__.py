"""Join, authorize, check, and describe hosts."""
