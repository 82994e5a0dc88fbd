"""What a run leaves: its folder, checkpoints, symptoms, reports, pages and comparisons.

Nothing here affects what a run learns, except for defaults (presets.py) and a curriculum's level
(run.py).

It may import `fast/`, the chapters except train.py, and, in behaviour.py alone, the swarm. It never
imports `lab/`, `learn/` or `bridges/`.
"""
