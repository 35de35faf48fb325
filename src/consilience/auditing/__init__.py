"""Attacks on our own guarantees."""
