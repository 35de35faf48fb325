"""The command line."""

from consilience.cli.app import main

__all__ = ["main"]
