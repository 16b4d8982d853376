"""Faults of several ranks: installed on each of them by name, under the variant in which they show."""
