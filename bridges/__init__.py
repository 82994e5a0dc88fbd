"""In and out of other people's tools: endpoints, the hub, TRL, verifiers and prime-rl.

Each file here is a door that one reader needs and most never open. It may import any file of the
book, fast/ and bookkeeping/. Nothing imports it but the command line, when `--api-base` is given.
"""
