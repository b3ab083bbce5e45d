"""Curves as other tools keep them."""
