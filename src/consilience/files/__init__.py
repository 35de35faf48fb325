"""Signed files: what leaves a site, what leaves a hub, and what each of them says in words."""
