"""Makes the documentation site from docs/ and from the code itself; `make docs`."""
