"""How fast, and in how much memory: ours beside what a machine can do, and beside other libraries."""
