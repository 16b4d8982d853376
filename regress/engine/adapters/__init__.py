"""Adapters of a frozen model (LoRA, by peft): built, loaded, saved, and named."""
