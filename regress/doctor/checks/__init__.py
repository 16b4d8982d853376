"""Checks of the doctor: each looks at one part of a run and yields findings."""
