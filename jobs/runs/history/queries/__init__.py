"""What is answered of histories, each answer with its shape."""
