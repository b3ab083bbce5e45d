"""`make security`: what tools say of the code and of what is installed beside it."""
