"""Runs that report themselves over HTTPS: launched by somebody else, or by an engine whose machines have no Redis."""
