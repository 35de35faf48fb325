"""Learners: scikit-learn estimators that train at a site under a privacy budget."""
