"""After reading: exercises that you write and a judge checks; the loop without speed and records.

It may import any chapter and swarm/. Nothing imports it. `loop.py` is where a forker starts.
"""
