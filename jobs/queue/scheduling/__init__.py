"""Decide which queued jobs start on which hosts."""
