"""Import traces of runs that Meshboard did not launch."""
