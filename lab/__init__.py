"""The evidence: everything that the book and its pages claim is measured here, by commands that anybody can run again.

Nothing but tests imports the lab. Each file's docstring has its command (`python -m lab.claims`) and says what it writes
into results/. lab/common.py holds what the experiments share; the folders are sorted by purpose.
"""
