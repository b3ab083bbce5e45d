"""Steps event by event: where they are kept, and how they leave as a trace or come in from a run of somebody else's."""
