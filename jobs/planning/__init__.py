"""What the planner says of a draft, and the hardware that can be planned for."""
