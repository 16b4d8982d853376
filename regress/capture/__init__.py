"""Capture: puts any PyTorch trainer under test, without a change to its code."""
