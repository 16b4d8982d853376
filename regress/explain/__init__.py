"""Explanations of trainers: what recorded token gradients say about the loss that is really minimized."""
