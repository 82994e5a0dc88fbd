"""The world that env_swarm.py plays in: an economy of bots, in five files that are read in order.

economy (the rules and the books), tools (what a member can do), bots (scenarios, and who else plays),
players (scripted players of the model's part), governance (who decides what is accepted, and when).
This room is plain Python, as environments are: it imports NumPy and SciPy, metrics for intervals,
env_letters for how a reply is split, and nothing else of ours; no torch, no trainer.
"""
