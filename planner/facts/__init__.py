"""What the trainer obeys and the planner counts with: the spec, the shapes and the order of work; no predictions."""
