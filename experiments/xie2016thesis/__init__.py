"""Xie's thesis, 2016: private learning at one site, and average against feature method."""
