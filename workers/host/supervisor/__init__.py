"""The detached process of an attempt, which owns torchrun and all processes below it."""
