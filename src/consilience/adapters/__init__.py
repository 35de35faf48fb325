"""Engines that others run, behind the interfaces that this package has."""
