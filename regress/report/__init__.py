"""Reports of the judge's verdicts for people and machines: text, JSON, HTML. Loads no torch."""
