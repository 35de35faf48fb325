"""Xiang et al. 2018: collaborative forests and boosting with personalised budgets."""
