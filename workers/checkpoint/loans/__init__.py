"""A checkpoint that only another host has: who lends it, who borrows it, and what passes between them."""
