"""The same numbers, sooner: fast/ changes how long an update takes, and never its gradient."""

import os
import sys

if sys.platform == "darwin":  # before torch is imported: what Apple's GPU lacks, the CPU computes
    os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")
