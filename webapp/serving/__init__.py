"""Between the network and Django: what a connection may cost, and what never gets through."""
