"""``python -m regress``: the command, for launchers that start modules."""

from regress.cli import main

if __name__ == "__main__":
    main()
