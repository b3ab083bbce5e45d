"""Measures a host: products, memory, the trainer's layers, optimiser and collectives, few and many ranks at work."""
