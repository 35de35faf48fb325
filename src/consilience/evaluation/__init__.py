"""How good a model is, beside what its users would otherwise have."""
