"""Security checks of the code and its installed packages (`make security`)."""
