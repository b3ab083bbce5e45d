"""Pictures and checks of every page of a live board with finished jobs."""
