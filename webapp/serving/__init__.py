"""Layers between the network and Django, with the limits of a connection."""
