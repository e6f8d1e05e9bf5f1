"""Speed and memory, as ratios from one run. `python -m tests.bench.memory`, `python -m tests.bench.speed`."""
