"""The stages, one folder each. `stages.NAME` declares the parameters, `stages.NAME.run` does the work."""
