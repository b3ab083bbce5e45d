"""REST API, version 1, with the same specs and actions as the pages."""
