"""Judgement of one optimizer update: against golden values, its bitwise reference, or by its own invariants."""
