"""Sections of the configuration, a module each; `regress.engine.config.schema` puts them together."""
