"""A study played through on public records."""
