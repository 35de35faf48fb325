"""Statistics: sums over records that sites hand over instead of models."""
