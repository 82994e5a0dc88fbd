"""The same numbers, sooner: how long an update takes, and never the gradient of its episodes.

(Two exceptions: batches sampled ahead are older, and bfloat16 rounds.) It may import the chapters.
No chapter imports it: train.py plugs it in.
"""

import os

# Before torch is imported: what Apple's GPU lacks, the CPU computes. Elsewhere nobody reads it.
os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")
