"""What ails a run of which nothing ends any more."""
