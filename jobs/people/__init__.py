"""People: tokens and their scopes, projects and their members, and what a project hands its jobs."""
