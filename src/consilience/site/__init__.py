"""A site: its folder, and what it does with a hub."""
