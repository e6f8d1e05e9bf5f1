"""Pictures and pages: axes, charts as SVG, numbers as readers see them, and one style. Knows no stage."""
