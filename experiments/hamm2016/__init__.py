"""Hamm, Cao & Belkin, ICML 2016: learning privately from what many parties' classifiers say about auxiliary records."""
