"""How results are shown: as parts of web pages, and as charts."""
