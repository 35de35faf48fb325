"""Private trees, forests and boosting."""
