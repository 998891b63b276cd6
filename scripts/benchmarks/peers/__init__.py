"""Peers: other training code, each in its own process, which works on request."""
