"""The same numbers, sooner: fast/ changes how long an update takes, and never its gradient."""

import os

# Before torch is imported: what Apple's GPU lacks, the CPU computes. Elsewhere nobody reads it.
os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")
