"""In and out of other people's tools: endpoints, the hub, TRL, verifiers and prime-rl.

Each file here is a door that one reader needs and most never open. It may import any chapter, fast/
and bookkeeping/. Nothing imports these files but the command line, when `--api-base` is given.
"""
