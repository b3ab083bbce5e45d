"""REST, version 1: the same spec, the same actions as the pages."""
