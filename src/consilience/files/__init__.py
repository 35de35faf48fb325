"""Signed files: contributions of sites, releases of hubs, and certificates that explain them."""
