"""Aggregators combine what sites handed over into one ensemble.

Most of them only post-process; those that draw noise state and charge its cost.
"""
