"""The evidence: everything that the book and its pages claim is measured here, by commands that
anybody can run again.

Nothing but tests imports the lab. Each file's docstring has its command (`python -m lab.study`) and
says what it writes into results/. results/*.json are read by lab/tables.py alone, which makes the
pages' tables.
"""
