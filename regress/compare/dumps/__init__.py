"""Two dumps compared, whatever their layouts: units of work that do not depend on one another."""
