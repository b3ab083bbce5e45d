"""One detached process an attempt: owns torchrun and all below it, and speaks for it to Redis."""
