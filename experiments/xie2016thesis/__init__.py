"""Xie's thesis, 2016: single-site learning under privacy (chapter 3), average against feature method (chapter 5)."""
