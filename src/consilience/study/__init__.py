"""A study: what all sites agreed on, and the one road from contributions to a release."""
