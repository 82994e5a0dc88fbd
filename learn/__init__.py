"""After reading: exercises that you write and a judge checks, and runs broken on purpose.

It may import any chapter, fast/, swarm/ and bookkeeping/. Nothing imports it but the command line,
when `--break` is given.
"""
