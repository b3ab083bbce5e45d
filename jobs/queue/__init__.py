"""The queue: states, scheduling, what hosts say, and what a person can do to a job."""
