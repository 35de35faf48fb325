"""Xie, Plis & Sarwate, ICASSP 2017: the feature method."""
