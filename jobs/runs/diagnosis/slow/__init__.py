"""What ails a run that goes on, and slower than it might."""
