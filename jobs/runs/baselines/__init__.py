"""Runs that the gate holds others to, kept by project and branch."""
