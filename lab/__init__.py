"""The evidence: what the code and its pages claim is measured here, by commands you can run again.

Only tests import the lab. Each file's docstring has its command (`python -m lab.study`) and says
what it writes into results/. lab/tables.py makes the pages' tables from results/*.json.
"""
