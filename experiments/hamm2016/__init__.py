"""Hamm, Cao & Belkin, ICML 2016: distilling many parties' classifiers privately into one."""
