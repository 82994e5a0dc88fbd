"""Shared by the tests of bridges/verifiers, which need the real verifiers: `make test-verifiers` gives them a .venv-verifiers of their own.
Without it they are skipped.

Every server is on loopback. `vf-eval` runs as people run it, as a process of its own.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: a wrong name must fail at once
