"""Aggregators: combine what sites handed over into one ensemble; what is not post-processing states its cost."""
