"""One module an axis, and the order in which they make a model into a rank's part of it."""
