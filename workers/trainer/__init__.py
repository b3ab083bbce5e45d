"""Trains one decoder-only transformer under any product of DP or ZeRO, PP and TP. Started by torchrun."""
