"""Metrics of a run: written to its own file, and to any tracker that accelerate knows."""
