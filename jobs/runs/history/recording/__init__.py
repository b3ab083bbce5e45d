"""Record the streams of attempts into histories."""
