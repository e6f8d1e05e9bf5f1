"""Not a stage: the text that stages read, from its sources to token ids."""
