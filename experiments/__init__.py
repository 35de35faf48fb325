"""Every experiment of the papers behind this library, run again in the open; README.md says how."""
