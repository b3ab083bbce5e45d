"""What `make up` is made of: children kept alive together, a Redis of its own, words for whoever looks on."""
