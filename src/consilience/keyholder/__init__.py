"""Keyholders: whom sites believe not to collude with the hub, and what they keep."""
