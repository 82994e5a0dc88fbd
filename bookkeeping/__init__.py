"""What a run leaves: its folder, checkpoints, symptoms, reports, pages and comparisons.

Nothing here affects what a run learns, but for a mistake made on purpose (failures.py).

It may import `fast/`, the chapters, and, in behaviour.py alone, the swarm. No chapter imports it:
train.py plugs it in.
"""
