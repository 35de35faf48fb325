"""Distillation: one model from what members say about public records."""
