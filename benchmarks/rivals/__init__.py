"""The trainer against nanoGPT's and picotron's own train.py. Their code is brought by whoever runs this."""
