"""Without torch, so that a checkpoint's headers can be judged by it (workers/models/stored.py)."""

# Columns that share a scale, in 4 bits: GGUF's block, and the only group here.
GROUP = 32
