"""Shared by the tests of bridges/verifiers, which need the real verifiers: `make test-all` gives
them a .venv-all of their own. Without it they are skipped.

Every server is on loopback. `vf-eval` runs as people run it, as a process of its own.
"""

import os
import sys
from pathlib import Path

# before transformers is imported: a wrong name must fail at once
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import endpoint  # noqa: F401  (while tests/ is on the path: its helpers are used here)
import helpers  # noqa: F401

# tests/conftest.py put tests/ on the path, where the folders vllm/ and verifiers/ would pass for
# installed packages; TRL falls for it.
TESTS = Path(__file__).resolve().parents[1]
sys.path[:] = [path for path in sys.path if Path(path).resolve() != TESTS]
