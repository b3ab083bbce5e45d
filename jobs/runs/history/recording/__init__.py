"""From the streams of an attempt's members to its files."""
