"""Tests of accounts, projects, roles, tokens, and the variables of a project."""
