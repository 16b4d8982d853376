"""Capture: puts any PyTorch trainer under test, without a change to its code.

`record` hooks model and optimizer and writes an ordinary dump; `tap_batch` is the explicit form for values that
no hook can see.
"""
