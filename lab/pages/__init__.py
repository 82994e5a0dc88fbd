"""Pages that are made from code and runs: the checked numbers of the book, the walk with a clock, the failure journal,
pico.py with its tensors."""
