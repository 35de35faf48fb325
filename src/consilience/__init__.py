"""consilience: learn one good classifier together without sharing records."""
