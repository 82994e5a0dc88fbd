"""What a run leaves: its folder, checkpoints, symptoms, reports, pages and comparisons.

Nothing in this room changes a number of the training. Delete it, and a run learns the same.

It may import the story (metrics, policy, rollout, grpo, settings), `fast/`, and, in behaviour.py
alone, the swarm. It never imports `lab/`, `learn/` or `bridges/`.
"""
