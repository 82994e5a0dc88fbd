"""The world that env_swarm.py plays in: one economy, six files, in reading order.

economy     the members, the books and the rules      tools       what a member can do
bots        the scenarios, and the scripted bots      view        what the model sees
players     scripts in the model's place              governance  whose deals to trust, and when

This folder is plain Python, as environments are. It may import NumPy and SciPy, env_letters (to
split a reply) and metrics (for intervals), and nothing else of ours: no torch, no trainer.
"""
