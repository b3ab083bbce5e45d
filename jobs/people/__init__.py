"""Users: API tokens, projects and their members, invitations, and sign-on."""
