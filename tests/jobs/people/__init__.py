"""Projects, roles, tokens and what a project hands its jobs."""
