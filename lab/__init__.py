"""The evidence: what the book and its pages claim is measured here, by commands to run again.

Nothing but tests imports the lab. Each file's docstring has its command (`python -m lab.study`) and
says what it writes into results/. lab/tables.py makes the pages' tables of results/*.json.
"""
