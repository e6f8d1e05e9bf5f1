"""Not a stage: the decoder-only language model as every stage sees it, one block at a time."""
