"""One optimizer update judged: against golden values, its twin, or nothing but itself."""
