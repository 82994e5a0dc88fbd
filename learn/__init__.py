"""After reading: exercises that you write and the judge checks, and runs that are broken on purpose.

It may import any file of the book, fast/, swarm/ and bookkeeping/. Nothing imports it but the
command line, when `--break` is given.
"""
