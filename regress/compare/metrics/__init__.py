"""Measures of two arrays, taken in one pass over them."""
