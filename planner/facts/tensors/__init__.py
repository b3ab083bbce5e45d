"""Where the parts of tensors lie: on which axis, in which box, and how large they are."""
