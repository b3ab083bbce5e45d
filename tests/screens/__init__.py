"""Every page of a live board with finished jobs, looked at by a browser: pictures, and what is wrong with them."""
