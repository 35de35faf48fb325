"""A study of ours: real hospitals, and what their differences do to every way of joining."""
