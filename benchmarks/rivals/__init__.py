"""Compare the trainer with train.py of nanoGPT and of picotron, from checkouts of the user."""
