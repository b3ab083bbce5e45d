"""What hosts say, taken in: events, what is believed of them, and silence."""
