"""The rules of the diagnosis: tables, theme by theme, and the conditions that they name."""
