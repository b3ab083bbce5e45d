"""The collective lab: every primitive timed at each size, checked to the element, and shown on tiny tensors."""
