"""Dumps of other systems as records: read without their code, and without executing anything in them."""
