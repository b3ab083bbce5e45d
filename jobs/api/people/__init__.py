"""REST of who works here: tokens, projects, and whom a project tells of its jobs."""
