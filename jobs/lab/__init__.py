"""The collective lab: its form, its pages, and what its runs found."""
